"""The `halfbyte` command, as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import halfbyte as package
from halfbyte import __version__
from halfbyte.assets import bundled_model_path
from halfbyte.cli import app, main
from halfbyte.cli.generate import _run as generate
from halfbyte.kernels.cpu.library import level
from slow import slow

Command = Callable[..., tuple[int, str, str]]


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["halfbyte", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    code = end.value.code
    return code if isinstance(code, int) else 0, captured.out, captured.err


@pytest.fixture
def halfbyte(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


def test_generate_json(halfbyte: Command) -> None:
    code, out, err = halfbyte("generate", "--prompt", "import os\n", "--max-tokens", "8", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert len(result["tokens"]) == 8
    assert result["text"]
    assert result["kv_cache"]["dtype"] == "nvfp4"
    assert result["kv_cache"]["recipe"] == "balanced"
    page = 16 * result["kv_cache"]["bytes_per_token"]
    assert result["kv_cache"]["bytes_used"] == page
    assert result["timings"]["decode_tokens_per_s"] > 0


def test_generate_prints_text_and_table(halfbyte: Command) -> None:
    arguments = ("generate", "--prompt", "import os\n", "--max-tokens", "8")
    code, out, _ = halfbyte(*arguments)
    assert code == 0
    assert out.startswith("import os\n")
    assert "bfloat16: " in out
    assert "3.56x" in out
    assert "tokens/s" in out
    text = json.loads(halfbyte(*arguments, "--json")[1])["text"]
    assert text in out


def test_generate_writes_the_prompt_with_the_first_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first step logs does not stand in the prompt's line."""
    llm = package.LLM(bundled_model_path())
    stream = llm.stream

    def logging(prompt: str, params: Any) -> Any:
        print("logged")
        return (yield from stream(prompt, params))

    monkeypatch.setattr(llm, "stream", logging)
    output = generate(llm, "x = [", package.SamplingParams(max_tokens=2), {}, show=True)
    assert capsys.readouterr().out == f"logged\nx = [{output.text}\n"


def test_generate_seed_repeats(halfbyte: Command) -> None:
    def sample(seed: str) -> str:
        arguments = ("--prompt", "def ", "--max-tokens", "12", "--temperature", "1", "--json")
        return json.loads(halfbyte("generate", *arguments, "--seed", seed)[1])["text"]

    assert sample("3") == sample("3")
    assert len({sample(str(seed)) for seed in range(4)}) > 1


def test_generate_stop(halfbyte: Command) -> None:
    arguments = ("generate", "--prompt", "import os\nimport ", "--max-tokens", "40", "--json")
    result = json.loads(halfbyte(*arguments, "--stop", "\n")[1])
    assert "\n" not in result["text"]
    assert result["finish_reason"] == "stop"


@pytest.mark.parametrize("dtype", ["auto", "float16", "fp8", "fp4_e2m1", "nvfp4_4over6", "mxfp4"])
def test_generate_dtypes(halfbyte: Command, dtype: str) -> None:
    arguments = ("--prompt", "x = [", "--max-tokens", "4", "--kv-cache-dtype", dtype, "--json")
    code, out, _ = halfbyte("generate", *arguments, "--kv-recipe", "plain")
    assert code == 0
    assert json.loads(out)["kv_cache"]["recipe"] == "plain"
    expected = {"auto": "bfloat16", "fp8": "fp8_e4m3", "fp4_e2m1": "nvfp4"}.get(dtype, dtype)
    assert json.loads(out)["kv_cache"]["dtype"] == expected


def test_generate_names_the_chosen_formats(halfbyte: Command) -> None:
    """Also if the recipe chooses their block scales otherwise."""
    arguments = ("generate", "--prompt", "x = [", "--max-tokens", "4")
    for k, v, expected in (
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4", "nvfp4_4over6", "nvfp4+nvfp4_4over6"),
        ("nvfp4_4over6", "nvfp4_4over6", "nvfp4_4over6"),
    ):
        code, out, _ = halfbyte(*arguments, "--kv-cache-dtype", k, "--v-cache-dtype", v)
        assert code == 0
        lines = [line.split() for line in out.splitlines()]
        assert ["KV", "cache", expected] in lines
        assert ["recipe", "balanced"] in lines


def test_generate_with_another_format_for_v(halfbyte: Command) -> None:
    formats = ("--kv-cache-dtype", "fp8", "--v-cache-dtype", "nvfp4")
    code, out, _ = halfbyte(
        "generate", "--prompt", "x = [", "--max-tokens", "4", *formats, "--json"
    )
    assert code == 0
    assert json.loads(out)["kv_cache"]["dtype"] == "fp8_e4m3+nvfp4"


def truncated_model(folder: Path) -> Path:
    for file in bundled_model_path().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--kv-cache-dtype", "int3"], "unknown 'int3'; expected one of auto"),
        (["--prompt", "x", "--v-cache-dtype", "int3"], "unknown 'int3'; expected one of auto"),
        (["--prompt", ""], "--prompt: is empty"),
        (["--prompt-file", "/nowhere"], "--prompt-file: /nowhere: cannot be read: No such file"),
        (["--prompt", "x " * 20000], "leave no room to generate in a context of"),
        (["--prompt", "x", "--model", "/no/such/model"], "/no/such/model: no such folder"),
        (["--prompt", "x", "--num-pages", "3", "--max-tokens", "99"], "out of KV cache pages"),
        (["--prompt", "x", "--num-pages", "1"], "num_pages: expected at least 2"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens: expected at least 1"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--attention-backend", "abacus"], "unknown 'abacus'"),
        (["--prompt", "x", "--dtype", "int8"], "dtype: expected one of auto, float32"),
        (["--prompt", "x", "--seed", str(2**70)], "seed: expected a number in 0 .. 2^63 - 1"),
        (["--prompt", "\udcff"], "prompt: is not valid text"),
        (["--prompt", "x", "--num-pages", "-3"], "num_pages: expected at least 1"),
    ],
    ids=lambda x: x[-2] if isinstance(x, list) else "",
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_generate_bad_input(
    halfbyte: Command, arguments: list, message: str, as_json: bool
) -> None:
    code, out, err = halfbyte("generate", *arguments, *(["--json"] if as_json else []))
    assert code == 1
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    if as_json:
        assert out == ""


def test_generate_truncated_model(halfbyte: Command, tmp_path: Path) -> None:
    arguments = ("generate", "--prompt", "x", "--model", str(truncated_model(tmp_path)))
    code, _, err = halfbyte(*arguments)
    assert code == 1
    assert err.startswith(f"error: {tmp_path}/model.safetensors: expected a whole safetensors file")
    assert err.count("\n") == 1


def test_generate_indivisible_head_size(halfbyte: Command, tmp_path: Path) -> None:
    from models.zoo import make_model

    make_model("qwen3", head_dim=24).save_pretrained(tmp_path)
    for file in bundled_model_path().glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    code, _, err = halfbyte("generate", "--prompt", "x", "--model", str(tmp_path))
    assert code == 1
    assert "head_size: nvfp4 needs a positive multiple of 16, got 24" in err


def test_eval_json(halfbyte: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\n\n\ndef main():\n    print(os.getcwd())\n")
    arguments = ("--text", str(text), "--kv-cache-dtype", "bfloat16,nvfp4", "--chunk-size", "4")
    code, out, err = halfbyte("eval", *arguments, "--json")
    assert (code, err) == (0, "")
    bf16, nvfp4 = json.loads(out)
    assert [bf16["kv_cache_dtype"], nvfp4["kv_cache_dtype"]] == ["bfloat16", "nvfp4"]
    assert bf16["chunk_size"] == 4
    assert bf16["kl_divergence"] == 0 < nvfp4["kl_divergence"]
    assert bf16["bytes_per_token"] / nvfp4["bytes_per_token"] == pytest.approx(32 / 9)
    assert nvfp4["perplexity"] > 1


def test_eval_prints_a_table(halfbyte: Command) -> None:
    code, out, _ = halfbyte("eval", "--max-tokens", "200", "--window", "100")
    assert code == 0
    for name in ("bfloat16", "fp8_e4m3", "nvfp4"):
        assert name in out
    assert "read back from the cache in chunks of 512" in out


def test_eval_of_retrieval(halfbyte: Command) -> None:
    arguments = ("--retrieval", "500", "--kv-cache-dtype", "bfloat16,nvfp4")
    code, out, _ = halfbyte("eval", *arguments, "--kv-recipe", "balanced")
    assert code == 0
    assert "nvfp4 balanced" in out
    assert "5 facts and a random segment, twice, in " in out
    code, out, _ = halfbyte("eval", *arguments, "--json")
    assert [row["asked"] for row in json.loads(out)] == [5, 5]


def test_eval_of_greedy_continuations(halfbyte: Command) -> None:
    arguments = ("--greedy", "6", "--window", "40", "--max-tokens", "120")
    formats = ("--kv-cache-dtype", "bfloat16,nvfp4", "--kv-recipe", "plain,balanced")
    code, out, _ = halfbyte("eval", *arguments, *formats)
    assert code == 0
    assert "nvfp4 balanced" in out
    assert "prompts, continued by 6 tokens each, greedily" in out
    rows = json.loads(halfbyte("eval", *arguments, *formats, "--json")[1])
    assert [(row["agreed"], row["new_tokens"]) for row in rows[:1]] == [(6, 6)]
    assert all(0 <= row["agreed"] <= 6 for row in rows)


def test_eval_layer_by_layer(halfbyte: Command) -> None:
    arguments = ("--layers", "--window", "100", "--max-tokens", "200")
    formats = ("--kv-cache-dtype", "float32,nvfp4", "--kv-recipe", "plain")
    code, out, _ = halfbyte("eval", *arguments, *formats)
    assert code == 0
    assert "layer 0, float32" in out
    assert "exact" in out
    assert "200 tokens, 100 of context" in out
    rows = json.loads(halfbyte("eval", *arguments, *formats, "--json")[1])
    assert rows[0]["k_sqnr_db"] is None  # nothing is lost
    assert all((row["logit_error"] > 0) == (row["kv_cache_dtype"] == "nvfp4") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/no/such/file"], "No such file"),
        (["--greedy", "0"], "new_tokens: expected at least 1, got 0"),
        (["--greedy", "4000"], "greedy: 4000 tokens leave no room in a context of 2048"),
        (["--greedy", "4", "--retrieval", "500"], "greedy, layers, retrieval: are measured"),
        (["--layers", "--attention-backend", "cpu"], "--layers reads K and V back without one"),
        (["--kv-cache-dtype", "nvfp4,int3"], "unknown 'int3'"),
        (["--chunk-size", "0"], "chunk_size: expected at least 1"),
        (["--window", "1"], "window: expected at least 2"),
        (["--max-tokens", "-1"], "max_tokens: expected at least 2, got -1"),
        (["--retrieval", "100"], "retrieval: tokens: 100 for 1 facts need"),
        (["--retrieval", "5000"], "contexts: expected 1 up to 2048 tokens, got"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_eval_bad_input(halfbyte: Command, arguments: list, message: str) -> None:
    code, out, err = halfbyte("eval", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_eval_refuses_what_is_not_text(halfbyte: Command, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    code, _, err = halfbyte("eval", "--text", str(binary))
    assert code == 1
    assert "is not UTF-8 text" in err


def test_info_json(halfbyte: Command) -> None:
    code, out, _ = halfbyte("info", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["versions"]["halfbyte"] == __version__
    assert report["machine"]["cpu_kernels"] == (level() or "not built")
    assert {
        "name": "nvfp4",
        "bits_per_value": 4.5,
        "scales": "one per 16, one per layer",
    } in report["kv_cache_dtypes"]
    for kind in ("store_backends", "attention_backends", "linear_backends", "moe_backends"):
        assert {
            "name": "reference",
            "supported": True,
            "reason": "runs wherever PyTorch does",
        } in report[kind]


def test_info_prints_tables(halfbyte: Command) -> None:
    code, out, _ = halfbyte("info")
    assert code == 0
    assert "nvfp4_4over6" in out
    assert "attention backend" in out
    assert "linear backend" in out
    assert "MoE backend" in out


@pytest.mark.parametrize(
    "arguments", [["generate"], ["nonsense"], ["generate", "--prompt"]], ids=str
)
def test_usage_errors_exit_with_2(halfbyte: Command, arguments: list) -> None:
    code, _, err = halfbyte(*arguments)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--" + "x" * 5000], "No such option: --xxx"),
        (["info", "x" * 5000], "unexpected extra argument"),
        (["info", "\x1b[31m\n\x07"], r"unexpected extra argument(s) (\x1b[31m\x0a\x07)"),
        (["generate", "--model", " "], "expected a folder or hub id"),
        (["x\ny" * 5000], "No such command"),
    ],
    ids=["option", "argument", "control", "callback", "command"],
)
def test_usage_errors_are_short_and_printable(
    halfbyte: Command, arguments: list[str], message: str
) -> None:
    code, _, err = halfbyte(*arguments)
    last = err.splitlines()[-1]
    assert code == 2
    assert last.startswith("Error: ")
    assert message in last
    assert last.isprintable()
    assert len(last) < 800


def test_errors_are_short_and_printable(halfbyte: Command) -> None:
    code, _, err = halfbyte("generate", "--prompt", "x", "--model", "/\x1b[31m" + "x" * 5000)
    assert code == 1
    assert err.startswith("error: /\\x1b[31mxxx")
    assert err.endswith("no such folder\n")
    assert err[:-1].isprintable()
    assert len(err) < 700


@pytest.mark.parametrize("is_absent", [True, False])
def test_a_prompt_from_closed_standard_input(
    halfbyte: Command, monkeypatch: pytest.MonkeyPatch, is_absent: bool
) -> None:
    """Python has none if the file descriptor was closed when it started."""
    with open(os.devnull) as closed:
        pass
    monkeypatch.setattr(sys, "stdin", None if is_absent else closed)
    expected = "standard input: expected text, but it is closed\n"
    assert halfbyte("generate", "--prompt", "-") == (1, "", f"error: --prompt: {expected}")
    assert halfbyte("chat") == (1, "", f"error: {expected}")


def test_only_the_option_asks_for_a_traceback(
    halfbyte: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = halfbyte("generate", "--prompt", "x", "--model", "/none", "--stop", "-v")
    assert (code, err) == (1, "error: /none: no such folder\n")
    with pytest.raises(ValueError, match="/none: no such folder"):
        halfbyte("generate", "--prompt", "x", "--model", "/none", "-v")
    assert halfbyte("generate", "--prompt", "x", "--model", "/none")[0] == 1


def test_command_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "halfbyte"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert version.stdout == f"halfbyte {__version__}\n"
    broken = subprocess.run(
        [*command, "generate", "--prompt", "x", "--model", "/none"], capture_output=True, text=True
    )
    assert broken.returncode == 1
    assert broken.stderr == "error: /none: no such folder\n"


def test_generate_echoes_the_prompt_as_it_is(halfbyte: Command) -> None:
    _, out, _ = halfbyte("generate", "--prompt", "a :heart:\tz [bold]", "--max-tokens", "1")
    assert out.startswith("a :heart:\tz [bold]")


def test_eval_keeps_line_ends(halfbyte: Command, tmp_path: Path) -> None:
    results = []
    for ends in ("\n", "\r\n"):
        text = tmp_path / "text.py"
        text.write_bytes(ends.join(["import os", "import sys", ""]).encode())
        _, out, _ = halfbyte("eval", "--text", str(text), "--kv-cache-dtype", "nvfp4", "--json")
        results.append(json.loads(out)[0]["tokens"])
    assert results[0] < results[1]


@pytest.mark.parametrize("arguments", [["-h"], ["generate", "-h"], ["bench", "attention", "-h"]])
def test_short_help(halfbyte: Command, arguments: list[str]) -> None:
    code, out, _ = halfbyte(*arguments)
    assert code == 0
    assert out.lstrip().startswith("Usage: ")


@pytest.mark.parametrize("name", ["", " "])
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompt", "x", "--model", "{}"),
        ("eval", "--model", "{}"),
        ("calibrate", "{}"),
        ("quantize", "--format", "modelopt", "--", "{}", "new"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_empty_name_is_no_model(
    halfbyte: Command, arguments: tuple[str, ...], name: str
) -> None:
    """As of a shell's variable that is not set."""
    code, out, err = halfbyte(*(argument.format(name) for argument in arguments))
    assert (code, out) == (2, "")
    assert "expected a folder or hub id, got an empty name" in err


def test_names_of_the_package() -> None:
    assert {"LLM", "Cache", "SamplingParams", "load_model", "attention"} <= set(dir(package))
    assert "Any" not in dir(package)


def test_generate_in_a_smaller_context(halfbyte: Command) -> None:
    arguments = ("--prompt", "import os", "--max-tokens", "50", "--json", "--max-model-len", "12")
    code, out, _ = halfbyte("generate", *arguments)
    assert code == 0
    result = json.loads(out)
    assert result["prompt_tokens"] + len(result["tokens"]) == 12
    assert result["finish_reason"] == "length"


def test_prompts_from_a_file_and_standard_input(halfbyte: Command, tmp_path: Path) -> None:
    options = ("--max-tokens", "4", "--json")
    code, expected, _ = halfbyte("generate", "--prompt", "def main(\n", *options)
    assert code == 0
    file = tmp_path / "prompt"
    file.write_text("def main(\n")
    code, out, err = halfbyte("generate", "--prompt-file", str(file), *options)
    assert (code, err) == (0, "")
    assert json.loads(out)["text"] == json.loads(expected)["text"]
    command = [sys.executable, "-m", "halfbyte", "generate", "--prompt", "-", *options]
    ended = subprocess.run(command, input="def main(\n", capture_output=True, text=True)
    assert json.loads(ended.stdout)["text"] == json.loads(expected)["text"]
    for wrong in ((), ("--prompt", "a", "--prompt-file", str(file))):
        code, _, err = halfbyte("generate", *wrong)
        assert code == 2
        assert "expected one of --prompt and --prompt-file" in err
    file.write_bytes(b"\xff")
    code, _, err = halfbyte("generate", "--prompt-file", str(file))
    assert (code, err) == (
        1,
        f"error: --prompt-file: {file}: is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in "
        "position 0: invalid start byte\n",
    )


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["abacus"], 2)])
@pytest.mark.parametrize("is_last", [False, True])
def test_interrupts_while_leaving_are_silent(
    arguments: list[str], status: int, is_last: bool
) -> None:
    """Before Python's last steps they end the process at once; then its status is settled."""
    program = f"""
import atexit, os, signal
from unittest.mock import patch
def interrupt_at_exit():
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
if {is_last}:
    interrupt_at_exit()
from halfbyte.cli import main, signals
end_at_once = signals.end_at_once
def end_then_interrupt():
    end_at_once()
    if not {is_last}:
        interrupt_at_exit()
with patch.object(signals, "end_at_once", end_then_interrupt):
    main()
"""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == (status if is_last else 130)
    assert ended.stdout.startswith("halfbyte " if status == 0 else "")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("module", ["halfbyte.cli", "typer", "halfbyte.cli.serve"])
def test_interrupts_while_modules_are_imported_are_silent(module: str) -> None:
    """Each sends itself what Ctrl-C sends."""
    program = f"""
import os, signal, sys
class Interrupter:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
from halfbyte.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handles", [False, True])
def test_signals_that_a_library_drops_end_the_command(number: int, handles: bool) -> None:
    """As torch does while it imports NumPy. What handles the exception is not interrupted."""
    program = f"""
import os, sys, time
class Library:
    def find_spec(self, name, *_):
        if name != "torch":
            return
        sys.meta_path.remove(self)
        try:
            os.kill(os.getpid(), {int(number)})
        except BaseException:
            if {handles}:
                time.sleep(1.2)
                print("removed", flush=True)
                raise
        time.sleep(50)
        os._exit(99)
sys.meta_path.insert(0, Library())
from halfbyte.__main__ import main
main()
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, text=True)
    assert time.monotonic() - start < 40
    assert (ended.returncode, ended.stderr) == (128 + number, "")
    assert ended.stdout == ("removed\n" if handles else "")


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors in a POSIX shell")
@pytest.mark.parametrize(
    ("arguments", "closed", "status", "printed"),
    [
        ("--version", ">&-", 0, ""),
        ("--version", "2>&-", 0, f"halfbyte {__version__}\n"),
        slow("generate --prompt x --max-tokens 2 --json", ">&-", 0, ""),
        ("generate --model /nowhere --prompt x", ">&- 2>&- <&-", 1, ""),
        ("--nonsense", "2>&-", 2, ""),
    ],
)
def test_closed_streams(arguments: str, closed: str, status: int, printed: str) -> None:
    command = f'exec "$0" -m halfbyte {arguments} {closed}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, printed, "")


def path_options() -> list[list[str]]:
    """Command lines with an empty path, one per argument and option that is a path."""
    found = []

    def walk(command: Any, words: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])
        for param in command.params:
            if param.metavar != "PATH":
                continue
            needed = [p for p in command.params if p.required and p is not param]
            line = [x for p in needed for x in ([p.opts[0], "x"] if p.opts[0][0] == "-" else ["x"])]
            option = [param.opts[0], ""] if param.opts[0].startswith("-") else [""]
            found.append([*words, *line, *option])

    walk(typer.main.get_command(app), [])
    return found


def test_there_are_options_that_are_paths() -> None:
    assert len(path_options()) >= 8
    assert next(x for x in path_options() if x[0] == "quantize")[:2] == ["quantize", "x"]


@pytest.mark.parametrize("line", path_options(), ids=" ".join)
def test_empty_paths_are_no_folder(
    halfbyte: Command, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset shell variable is not the working directory."""
    monkeypatch.chdir(tmp_path)
    status, _, err = halfbyte(*line)
    assert status == 2
    assert "expected a path, got an empty one" in err
    assert list(tmp_path.iterdir()) == []
