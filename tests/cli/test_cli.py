"""The `halfbyte` command: `eval`, `info`, help, and errors of usage."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import halfbyte as package
from cli.running import Command
from halfbyte import __version__
from halfbyte.cli import app
from halfbyte.kernels.cpu.library import level


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
