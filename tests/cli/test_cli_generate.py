"""`halfbyte generate`: results, formats, prompts and bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halfbyte as package
from cli.running import Command
from halfbyte.assets import bundled_model_path
from halfbyte.cli.generate import _run as generate


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


def test_generate_echoes_the_prompt_as_it_is(halfbyte: Command) -> None:
    _, out, _ = halfbyte("generate", "--prompt", "a :heart:\tz [bold]", "--max-tokens", "1")
    assert out.startswith("a :heart:\tz [bold]")


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
