import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StableLmConfig, StableLmForCausalLM

from halfbyte.models import ENGINE, ModelLoadError, UnsupportedModelError, load_model, register
from models.zoo import make_model, token_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_load_model(folder: Path) -> None:
    model = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert load_model(folder, dtype="float32").dtype == torch.float32


def corrupt(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "no-weights":
        weights.unlink()
    elif how == "no-config":
        config.unlink()
    elif how == "config-not-json":
        config.write_text("{")
    elif how == "other-shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 128}))
    elif how == "more-layers":
        fields = json.loads(config.read_text())
        fields["num_hidden_layers"] = 5
        fields["layer_types"] = ["full_attention"] * 5
        config.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "no-weights",
        "no-config",
        "config-not-json",
        "other-shape",
        "more-layers",
    ],
)
def test_load_model_refuses_broken_folders(folder: Path, how: str) -> None:
    corrupt(folder, how)
    with pytest.raises(ModelLoadError) as error:
        load_model(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing-here", "a/b/c"])
def test_load_model_refuses_missing_folders(path: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_model(path)


def test_load_model_refuses_a_file(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file"):
        load_model(folder / "config.json")


def test_load_model_refuses_other_architectures(tmp_path: Path) -> None:
    config = StableLmConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    StableLmForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'stablelm' is not supported"):
        load_model(tmp_path)


def test_engine_attention_without_a_batch_says_what_to_do() -> None:
    register()
    model: Any = make_model("llama")
    model.set_attn_implementation(ENGINE)
    with pytest.raises(RuntimeError, match=r"use halfbyte\.Cache with generate"):
        model(input_ids=token_ids(1, 4))
