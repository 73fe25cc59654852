"""Commands on a checkpoint with NVFP4 weights."""

import json
import logging
import shutil
import sys
from collections.abc import Callable

import pytest

from checkpoints.folders import make_folder, quantize_folder
from halfbyte.assets import bundled_model_path
from halfbyte.cli import main

Command = Callable[..., tuple[str, str]]
EVAL = ("eval", "--json", "--kv-cache-dtype", "bfloat16", "--max-tokens", "600")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(bundled_model_path(), folder / "plain")
    return str(quantize_folder(folder, "modelopt", "nvfp4").quantized)


@pytest.fixture
def halfbyte(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command; gives back what it wrote to stdout and stderr."""

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["halfbyte", *arguments])
        with pytest.raises(SystemExit):
            main()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


@pytest.mark.parametrize("backend", [[], ["--linear-backend", "reference"]])
def test_generate(halfbyte: Command, model: str, backend: list[str]) -> None:
    arguments = ("--prompt", "import os\n", "--max-tokens", "6", "--json", "--model", model)
    out, _ = halfbyte("generate", *arguments, *backend)
    assert len(json.loads(out)["tokens"]) == 6


def test_eval_measures_what_quantized_activations_cost(halfbyte: Command, model: str) -> None:
    perplexities = []
    for choice in ("--no-quantize-activations", "--quantize-activations"):
        out, _ = halfbyte(*EVAL, "--model", model, choice)
        perplexities.append(json.loads(out)[0]["perplexity"])
    plain, quantized = perplexities
    assert plain != quantized
    assert quantized < 3 * plain


@pytest.mark.parametrize("command", [EVAL, ("generate", "--prompt", "x")], ids=lambda c: c[0])
def test_a_backend_that_cannot_run_is_one_line(
    halfbyte: Command, model: str, command: tuple[str, ...]
) -> None:
    out, err = halfbyte(*command, "--model", model, "--linear-backend", "nonsense")
    assert out == ""
    assert err.startswith("error: linear backend: unknown 'nonsense'; expected one of")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    files = [file for file in bundled_model_path().iterdir() if "token" in file.name]
    vocab_size = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
    made = make_folder(folder, "qwen3_moe", vocab_size=vocab_size)
    for file in files:
        shutil.copy(file, made.quantized)
    return str(made.quantized)


@pytest.mark.parametrize("command", [EVAL, ("generate", "--prompt", "x")], ids=lambda c: c[0])
def test_a_backend_of_experts(
    halfbyte: Command, mixture: str, command: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "halfbyte"):
        halfbyte(*command, "--model", mixture, "--moe-backend", "reference", "-v")
    assert "MoE backends: reference for 4" in caplog.text
    out, err = halfbyte(*command, "--model", mixture, "--moe-backend", "nonsense")
    assert out == ""
    assert err.startswith("error: MoE backend: unknown 'nonsense'; expected one of")
    assert err.count("\n") == 1
