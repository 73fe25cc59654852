"""Random command lines: one clear line each, without side effects.

A few dozen cases in CI. `HALFBYTE_FUZZ_CASES=2000` in the environment runs that many, from the
seed `HALFBYTE_FUZZ_SEED` (0) on. A failure names its seed and the command line.
"""

import io
import logging
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from bench.shared import measure_quickly
from cli.command_lines import (
    VALID,
    CommandLine,
    commands,
    make_command_line,
    make_paths,
    make_valid,
)
from cli.command_results import Result, problems, snapshot, surprises
from cli.openai_server import OpenAIServer, delta, end, serving, stream
from cli.running import small_model
from halfbyte.cli import main
from halfbyte.plugins.vllm import launch
from side_effects import GIB, TooSlow, Watch, bounds, forget_peak, peak

CASES = int(os.environ.get("HALFBYTE_FUZZ_CASES", "40"))
SEED = int(os.environ.get("HALFBYTE_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.is_on = False


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving() as server:
        server.replies = [stream(delta("ok"), end(1))]
        yield server


def halfbyte(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> Result:
    """Run a command in this process."""
    status, raised = -1, None
    sys.argv = ["halfbyte", *arguments]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception as error:  # --verbose asks for it
            raised = error
    out, err = capsys.readouterr()
    err += "".join(f"{warning.message}\n" for warning in seen)
    return Result(status, out, err, raised)


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


def stdin(kind: str) -> Any:
    if kind == "none":  # as Python starts without the file descriptor
        return None
    contents = {"text": b"def f(", "binary": b"\xff\xfe\0", "empty": b"", "closed": b""}
    file = Stdin(contents[kind])
    if kind == "closed":
        file.close()
    return file


@contextmanager
def surroundings(line: CommandLine) -> Iterator[None]:
    """Standard input, signal handlers and whether vLLM is found, as they are in a new process."""
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin(line.stdin))
        patch.setattr(sys, "argv", sys.argv)
        for name, value in line.environment.items():
            patch.setenv(name, value)
        if line.has_vllm:
            patch.setattr(launch, "find_spec", lambda name: name == "vllm")
            patch.setattr(launch, "entry_points", lambda **_: ("halfbyte",))
            patch.setattr(launch, "has_distribution", lambda: False)
            patch.setattr(os, "execvpe", lambda *_: sys.exit(0))
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def state() -> set[tuple[str, Any]]:
    """What a command must leave as it was."""
    return {
        ("dtype", torch.get_default_dtype()),
        ("gradients", torch.is_grad_enabled() and not torch.is_inference_mode_enabled()),
        ("threads", torch.get_num_threads()),
        ("folder", os.getcwd()),
        *os.environ.items(),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="bounds and peaks are Linux's")
def test_one_clear_line(
    model: Path,
    server: OpenAIServer,
    tmp_path: Path,
    watch: Watch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(commands()) == set(VALID)
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the command sets it
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    logging.getLogger("halfbyte").handlers.clear()  # of other tests, with their standard error
    measure_quickly(monkeypatch, 1)
    watch.allowed = (str(tmp_path),)
    watch.hosts = ("127.0.0.1", "localhost")
    for path in VALID:
        valid = make_valid(path, server.url)
        assert case(Random(0), model, tmp_path, watch, capsys, valid)[1:] == (0, "")
    statuses, failures = [], []
    for seed in range(SEED, SEED + CASES):
        random = Random(seed)
        line, status, found = case(random, model, tmp_path, watch, capsys, None, server.url)
        statuses.append(status)
        if found:
            command = shlex.join(x if len(x) < 200 else x[:99] + "…" for x in line.arguments)
            about = f"stdin {line.stdin}{', vLLM' * line.has_vllm}, {line.environment!a:.200}"
            failures.append(f"seed {seed}: halfbyte {command!a} ({about}): {found}")
            with capsys.disabled():
                print(failures[-1][:1500], flush=True)
    with capsys.disabled():
        print(f"{CASES} cases, {statuses.count(0)} ran, {statuses.count(2)} usage errors")
    assert not failures, "\n".join(failures)
    assert CASES < 30 or 0 < statuses.count(0) < CASES


def case(
    random: Random,
    model: Path,
    tmp_path: Path,
    watch: Watch,
    capsys: pytest.CaptureFixture[str],
    line: CommandLine | None,
    url: str = "",
) -> tuple[CommandLine, int, str]:
    """Run a command line in a new folder; returns what is wrong with what it did."""
    folder = tmp_path / "case"
    folder.mkdir()
    there = os.getcwd()
    os.chdir(folder)
    try:
        paths = make_paths(folder, model)
        line = line or make_command_line(random, paths, url)
        before, was = snapshot(folder), state()
        forget_peak()
        used = peak()
        watch.seen, watch.is_on = [], True
        result = Result(-1, "", "", None)
        found = []
        try:
            with surroundings(line), bounds():
                result = halfbyte(capsys, line.arguments)
        except TooSlow as error:
            capsys.readouterr()
            found = [str(error)]
        finally:
            watch.is_on = False
        found += problems(line, result) if not found else []
        found += [f"{(peak() - used) >> 20} MiB"] if peak() - used > GIB else []
        found += watch.seen + list(surprises(line, folder, before))
        found += [f"changed the state of the process: {was ^ state()}"] if was != state() else []
        with surroundings(CommandLine((), [], [])):
            usual = halfbyte(capsys, ["--version"])
        found += [] if usual.out.startswith("halfbyte ") and not usual.status else [f"then {usual}"]
        return line, result.status, "; ".join(found)
    finally:
        os.chdir(there)
        shutil.rmtree(folder)
