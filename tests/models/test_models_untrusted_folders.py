"""Folders that would run code or access a network are refused without doing so."""

import ast
import builtins
import io
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte
from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.kvcache import KV_SCALES_FILE
from halfbyte.models import (
    UnsupportedModelError,
    kv_calibration,
    load_model,
    load_tokenizer,
)
from halfbyte.quantization import quantize_checkpoint

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import {base} as Base
class Evil(Base):
    model_type = "evil"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A supported model; stdin answers yes to prompts, and network access raises."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(bundled_model_path(), folder)
    for name, base in (
        ("config", "PreTrainedConfig"),
        ("model", "PreTrainedModel"),
        ("tokenizer", "PreTrainedTokenizerFast"),
    ):
        code = CODE.format(marker=str(tmp_path / "ran"), base=base)
        (folder / f"evil_{name}.py").write_text(code)

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("asked the network or the user")

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return folder


def edit(folder: Path, name: str, **fields: object) -> None:
    file = folder / name
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, **fields}))


AUTO_MAP = {
    "AutoConfig": "evil_config.Evil",
    "AutoModelForCausalLM": "evil_model.Evil",
    "AutoTokenizer": ["evil_tokenizer.Evil", "evil_tokenizer.Evil"],
}


def calls(folder: Path) -> list[Any]:
    return [
        lambda: load_model(folder),
        lambda: load_tokenizer(folder),
        lambda: halfbyte.LLM(folder),
        lambda: quantize_checkpoint(folder, folder.parent / "out", dialect="modelopt"),
    ]


@pytest.mark.parametrize("call", range(4), ids=["load_model", "load_tokenizer", "LLM", "quantize"])
@pytest.mark.parametrize("model_type", ["evil", "detr", None])
def test_unknown_model_types_run_nothing(folder: Path, model_type: object, call: int) -> None:
    """DETR's configuration, for example, looks up its backbone on the hub."""
    edit(
        folder,
        "config.json",
        model_type=model_type,
        auto_map=AUTO_MAP,
        backbone="org/net",
        use_timm_backbone=False,
        architectures=["Evil"],
    )
    with pytest.raises(UnsupportedModelError, match=f"model type {model_type!r}") as error:
        calls(folder)[call]()
    assert "\n" not in str(error.value)
    assert not (folder.parent / "ran").exists()


def test_known_model_types_use_transformers_own_code(folder: Path) -> None:
    edit(folder, "config.json", auto_map=AUTO_MAP)
    edit(folder, "tokenizer_config.json", auto_map=AUTO_MAP)
    assert load_model(folder).config.model_type == "qwen3"
    assert len(load_tokenizer(folder)("import os").input_ids)
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("with_json", [True, False], ids=["tokenizer.json", "code-alone"])
@pytest.mark.parametrize("as_list", [False, True], ids=["object", "list"])
@pytest.mark.parametrize("reference", ["evil_tokenizer.Evil", "org/repo--evil_tokenizer.Evil"])
def test_unknown_tokenizers_run_nothing(
    folder: Path, reference: str, as_list: bool, with_json: bool
) -> None:
    """`tokenizer.json` is enough; their code does not run."""
    text = "import os"
    expected = load_tokenizer(folder)(text).input_ids
    pair = [reference, reference]
    auto_map = pair if as_list else {"AutoTokenizer": pair}
    edit(folder, "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map)
    if with_json:
        assert load_tokenizer(folder)(text).input_ids == expected
        assert halfbyte.LLM(folder).generate(text, halfbyte.SamplingParams(max_tokens=1))
    else:
        (folder / "tokenizer.json").unlink()
        for load in (load_tokenizer, halfbyte.LLM):
            with pytest.raises(CheckpointError) as error:
                load(folder)
            assert "\n" not in str(error.value)
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("call", range(4), ids=["load_model", "load_tokenizer", "LLM", "quantize"])
def test_adapters_are_not_followed(folder: Path, call: int) -> None:
    edit(folder, "adapter_config.json", base_model_name_or_path="org/base", peft_type="LORA")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json.*merge the adapter"):
        calls(folder)[call]()


@pytest.mark.parametrize("name", ["org/kernel", "flash_attention_2", "kernels-community/x:f"])
def test_configurations_choose_no_kernels(folder: Path, name: str) -> None:
    expected = load_model(folder)
    ids = torch.arange(7)[None]
    edit(
        folder,
        "config.json",
        attn_implementation=name,
        _attn_implementation=name,
        experts_implementation=name,
        _experts_implementation=name,
    )
    model = load_model(folder)
    assert model.config._attn_implementation == expected.config._attn_implementation
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_calibration_loads_the_tokenizer_the_same_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_calibration, "calibration_text", lambda: "import os\n" * 20)
    (folder / KV_SCALES_FILE).unlink()
    model = load_model(folder)
    edit(folder, "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=AUTO_MAP)
    scales = halfbyte.Cache(model, "nvfp4").kv_scales
    assert scales is not None
    assert scales.source.endswith("tokens of the built-in text")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        halfbyte.Cache(model, "nvfp4")
    assert not (folder.parent / "ran").exists()


def test_every_loader_forbids_remote_code() -> None:
    """All calls of `from_pretrained` and `from_config` in the package forbid remote code."""
    package = Path(halfbyte.__file__).parent
    found = 0
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            names = [node.func, *node.args]
            loaders = [n.attr for n in names if isinstance(n, ast.Attribute)]
            if not {"from_pretrained", "from_config"} & set(loaders):
                continue
            found += 1
            given = {keyword.arg or ast.unparse(keyword.value) for keyword in node.keywords}
            told = {"LOCAL_FILES", "trust_remote_code", "local_files_only"} & given
            assert told, f"{file}:{node.lineno}: {ast.unparse(node)}"
    assert found >= 5
