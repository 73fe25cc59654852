import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.kvcache import KVCacheDType, KVScales
from halfbyte.models import calibrate, load_model, resolve_kv_scales
from models.zoo import make_model, token_ids

NVFP4 = {KVCacheDType.NVFP4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def add_scales(folder: Path, name: str, declared: dict | None = None) -> None:
    tensors = {}
    for layer in range(4):
        for side in "kv":
            tensors[name.format(layer=layer, side=side)] = torch.tensor(0.01 * (layer + 1))
    save_file(tensors, folder / "scales.safetensors")
    if declared is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **declared}))


def test_calibrate_records_what_passes_through_the_cache() -> None:
    model = make_model("llama")
    ids = token_ids(1, 50)
    scales = calibrate(model, ids, "test", headroom=2.0)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    for layer in range(4):
        expected = [
            2 * float(t.abs().max()) for t in (cache.layers[layer].keys, cache.layers[layer].values)
        ]
        assert scales.amax_of_layer(layer) == pytest.approx(expected, rel=1e-5)


def test_calibrate_leaves_the_model_as_it_was() -> None:
    model = make_model("llama").train()
    calibrate(model, token_ids(1, 10), "test")
    assert model.training
    assert model.config._attn_implementation == "eager"


def test_resolve_kv_scales_none_needed() -> None:
    formats = {KVCacheDType.BFLOAT16, KVCacheDType.MXFP4}
    assert resolve_kv_scales(make_model("llama"), formats) is None


def test_resolve_kv_scales_is_repeatable_and_never_one() -> None:
    first, second = (resolve_kv_scales(make_model("llama"), NVFP4) for _ in range(2))
    assert first == second
    assert first is not None
    assert "calibration on 256 fixed token ids" in first.source
    assert 2688.0 not in first.k_amax + first.v_amax


def test_resolve_kv_scales_logs_the_source(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="halfbyte"):
        resolve_kv_scales(make_model("llama"), NVFP4, given=KVScales((1.0,) * 4, (1.0,) * 4, "me"))
    assert "KV cache scales: me" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{layer}.self_attn.{side}_proj.{side}_scale",
        "model.layers.{layer}.self_attn.{side}_scale",
        "model.layers.{layer}.self_attn.attn.{side}_scale",
    ],
    ids=["modelopt", "compressed-tensors", "vllm"],
)
def test_resolve_kv_scales_from_checkpoint(folder: Path, name: str) -> None:
    add_scales(folder, name, {"quantization_config": None})
    model = make_model("llama")
    model.config._name_or_path = str(folder)
    scales = resolve_kv_scales(model, {KVCacheDType.FP8_E4M3})
    assert scales is not None
    assert "checkpoint" in scales.source
    # Nothing declared: the scales are FP8's, amax / 448.
    assert scales.k_amax[1] == pytest.approx(0.02 * 448, rel=1e-6)


def test_resolve_kv_scales_of_a_declared_nvfp4_cache(folder: Path) -> None:
    add_scales(folder, "model.layers.{layer}.self_attn.{side}_scale")
    model = make_model("llama")
    model.config._name_or_path = str(folder)
    model.config.quantization_config = {"kv_cache_quant_algo": "NVFP4"}
    scales = resolve_kv_scales(model, NVFP4)
    assert scales is not None
    assert scales.k_amax[1] == pytest.approx(0.02 * 2688, rel=1e-6)


def test_resolve_kv_scales_from_a_saved_file(folder: Path) -> None:
    saved = KVScales((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), "calibration on a text")
    saved.save(folder)
    scales = resolve_kv_scales(load_model(folder), NVFP4)
    assert scales is not None
    assert (scales.k_amax, scales.v_amax) == (saved.k_amax, saved.v_amax)
    assert "kv_scales.json" in scales.source


def test_resolve_kv_scales_refuses_half_a_layer(folder: Path) -> None:
    save_file({"model.layers.0.self_attn.k_scale": torch.tensor(0.1)}, folder / "s.safetensors")
    model = make_model("llama")
    model.config._name_or_path = str(folder)
    with pytest.raises(ValueError, match="layer 0 has a k_scale only"):
        resolve_kv_scales(model, NVFP4)


def test_resolve_kv_scales_refuses_a_broken_file(folder: Path) -> None:
    (folder / "kv_scales.json").write_text("{")
    with pytest.raises(ValueError, match=r"kv_scales.json: not a file of KV scales"):
        resolve_kv_scales(load_model(folder), NVFP4)
