"""Compressed-tensors checkpoints loaded by the package, with a quantized halfbyte cache."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import halfbyte
from checkpoints.folders import load_model
from halfbyte.checkpoints import CheckpointError
from halfbyte.models import calibrate
from models.zoo import make_model, token_ids

pytest.importorskip("compressed_tensors")

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def write(folder: Path, sizes: dict[str, Any] | None = None, **section: Any) -> Path:
    """Write FP8 weights and KV scales, with or without a declared cache."""
    model = make_model("llama", **(sizes or {}))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax() / 448
        tensors |= {
            name: (tensors[name] / scale).to(torch.float8_e4m3fn),
            f"{name}_scale": scale.reshape(1),
        }
    for layer in range(model.config.num_hidden_layers):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor([0.05])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": FP8, "input_activations": None}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    config = json.loads((folder / "config.json").read_text())
    fields = {**config, "quantization_config": {**declared, **section}}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def values(model: Any, cache: Any) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        logits = model(token_ids(1, 40), past_key_values=cache, use_cache=True).logits
    layers: Any = cache.layers if isinstance(cache, DynamicCache) else ()
    return (logits, *(layer.values for layer in layers))


TARGETS = {
    "two": ["re:.*k_proj", "re:.*v_proj"],
    "ends": ["re:.*k_proj$", "re:.*v_proj$"],
    "class": ["re:.*[kv]_proj"],
    "alternatives": ["re:.*self_attn.(k|v)_proj$"],
}


@pytest.mark.parametrize("targets", [None, *TARGETS.values()], ids=["kv_cache_scheme", *TARGETS])
def test_k_and_v_reach_our_cache_bit_for_bit(tmp_path: Path, targets: list[str] | None) -> None:
    plain = load_model(write(tmp_path / "plain"))
    if targets:
        group = {"targets": targets, "weights": FP8, "output_activations": FP8}
        rest = {"targets": ["Linear"], "weights": FP8}
        folder = write(tmp_path / "declared", config_groups={"kv": group, "rest": rest})
    else:
        folder = write(tmp_path / "declared", kv_cache_scheme=FP8)
    model = load_model(folder)
    for found, expected in zip(
        values(model, DynamicCache()), values(plain, DynamicCache()), strict=True
    ):
        assert torch.equal(found, expected)
    ours, theirs = (values(m, halfbyte.Cache(m, "float32"))[0] for m in (model, plain))
    assert torch.equal(ours, theirs)
    cache = halfbyte.Cache(model, "auto")
    assert cache.pool.layout(0).k_dtype == "fp8_e4m3"
    assert cache.kv_scales is not None
    assert cache.kv_scales.k_amax[3] == pytest.approx(0.05 * 448)


@pytest.mark.parametrize("other", [None, {**FP8, "num_bits": 4}], ids=["k alone", "another"])
def test_k_and_v_in_different_formats_are_refused(tmp_path: Path, other: Any) -> None:
    k = {"targets": ["re:.*k_proj"], "weights": FP8, "output_activations": FP8}
    v = {"targets": ["re:.*v_proj"], "weights": FP8, "output_activations": other}
    rest = {"targets": ["Linear"], "weights": FP8}
    folder = write(tmp_path, config_groups={"k": k, "v": v, "rest": rest})
    with pytest.raises(CheckpointError, match="expected the same output_activations for k_proj"):
        load_model(folder)


def test_the_package_s_hooks_go_where_a_cache_is_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_model(write(tmp_path / "plain"))
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path / "x", kv_cache_scheme=FP8)).eval()
    rounded = values(model, DynamicCache())[1]
    expected = values(plain, DynamicCache())
    assert not torch.equal(rounded, expected[1])
    found = values(model, halfbyte.Cache(model, "float32"))
    assert torch.equal(found[0], values(plain, halfbyte.Cache(plain, "float32"))[0])
    assert "cache hooks from 4 attention modules" in caplog.text
    assert torch.equal(values(model, DynamicCache())[1], expected[1])


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("first", ["cache", "calibration"])
def test_rounded_outputs_go_where_a_cache_is_ours(
    tmp_path: Path, targets: list[str], first: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_model(write(tmp_path / "plain"))
    group = {"targets": targets, "weights": FP8, "output_activations": FP8}
    rest = {"targets": ["Linear"], "weights": FP8}
    folder = write(tmp_path / "x", config_groups={"kv": group, "rest": rest})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if re.search("[kv]_scale$", name)]:
        stored = re.sub("([kv])_scale$", r"\1_proj.output_scale", name)
        tensors[stored] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = values(plain, DynamicCache())
    rounded = values(model, DynamicCache())
    assert not any(torch.equal(found, x) for found, x in zip(rounded, expected, strict=True))
    if first == "cache":
        found = values(model, halfbyte.Cache(model, "float32"))
        assert torch.equal(found[0], values(plain, halfbyte.Cache(plain, "float32"))[0])
    else:
        measured = [calibrate(one, token_ids(1, 40), "test") for one in (model, plain)]
        assert measured[0] == measured[1]
    assert "cache hooks from 4 attention modules" in caplog.text
    after, expected = values(model, DynamicCache()), values(plain, DynamicCache())
    assert all(map(torch.equal, after, expected))
    caplog.clear()
    cache = halfbyte.Cache(model, "auto")
    assert not any("cache hooks" in message for message in caplog.messages)
    assert cache.pool.layout(0).k_dtype == "fp8_e4m3"
    assert cache.kv_scales is not None
    assert cache.kv_scales.k_amax[3] == pytest.approx(0.05 * 448)


def test_outputs_of_k_alone_are_refused_after_from_pretrained(tmp_path: Path) -> None:
    group = {"targets": ["re:.*k_proj"], "weights": FP8, "output_activations": FP8}
    rest = {"targets": ["Linear"], "weights": FP8}
    folder = write(tmp_path, config_groups={"k": group, "rest": rest})
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.k_proj.output_scale"] = torch.tensor([0.05])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="expected the same output_activations for k_proj"):
        halfbyte.Cache(model, "float32")


def test_outputs_that_declare_no_cache_stay(tmp_path: Path) -> None:
    """Those of all layers, as in `load_model`: the checkpoint's own arithmetic."""
    group = {"targets": ["Linear"], "weights": FP8, "output_activations": {**FP8, "dynamic": True}}
    folder = write(tmp_path, config_groups={"all": group})
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = values(model, DynamicCache())
    assert all(map(torch.equal, values(load_model(folder), DynamicCache()), before))
    halfbyte.Cache(model, "float32")
    assert torch.equal(values(model, DynamicCache())[1], before[1])


def test_unread_schemes_are_refused_for_package_weights(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, kv_cache_scheme={**FP8, "strategy": "attn_head"})
    with pytest.raises(halfbyte.models.ModelLoadError, match="kv_cache_scheme: strategy 'attn_h"):
        load_model(folder)
