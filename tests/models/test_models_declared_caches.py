"""A KV cache that any of a folder's files declares is the model's, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import halfbyte
from checkpoints.folders import load_model
from halfbyte.checkpoints import CheckpointError
from models.zoo import make_model, token_ids

FP8 = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
CT = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
LOADERS: dict[str, Any] = {
    "load_model": load_model,
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unquantized model with scales of K and V for |K| and |V| up to 22.4 in FP8."""
    make_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(4) for x in "kv"]
    tensors |= {name: torch.tensor([0.05]) for name in names}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write_modelopt_file(folder: Path, **cache: object) -> None:
    declared = {"quantization": {"quant_algo": None, **cache}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))


def check_fp8(model: Any) -> None:
    cache = halfbyte.Cache(model, "auto")
    assert cache.pool.layout(0).k_dtype == "fp8_e4m3"
    assert cache.kv_scales is not None
    assert cache.kv_scales.amax_of_layer(3) == pytest.approx((22.4, 22.4))


@pytest.mark.parametrize("loader", LOADERS)
def test_the_copy_declares_what_modelopts_file_leaves_out(folder: Path, loader: str) -> None:
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    edit(folder, quantization_config={"quant_method": "modelopt", "kv_cache_scheme": scheme})
    write_modelopt_file(folder)
    check_fp8(LOADERS[loader](folder))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_key_of_older_compressed_tensors(folder: Path, loader: str, is_nested: bool) -> None:
    section = {**CT, "kv_cache_scheme": FP8}
    edit(folder, compression_config={"quantization_config": section} if is_nested else section)
    check_fp8(LOADERS[loader](folder))


@pytest.mark.parametrize("scheme", [None, FP8])
def test_two_files_that_contradict_each_other(folder: Path, scheme: object) -> None:
    edit(folder, quantization_config={**CT, "kv_cache_scheme": scheme})
    write_modelopt_file(folder, kv_cache_quant_algo="NVFP4")
    message = "hf_quant_config.json: expected the KV cache that config.json declares"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)
    if scheme is None:  # else the package expects more tensors
        model = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(CheckpointError, match=message):
            halfbyte.Cache(model, "auto")


def test_results_by_name_whatever_a_config_says(folder: Path) -> None:
    """`return_dict` of a config is how a caller gets results; models read their own by name."""
    expected = halfbyte.Cache(model := load_model(folder), "fp8")
    logits = model(token_ids(1, 9), past_key_values=expected).logits
    edit(folder, return_dict=False)
    model = load_model(folder)
    assert torch.equal(
        model(token_ids(1, 9), past_key_values=halfbyte.Cache(model, "fp8")).logits, logits
    )
