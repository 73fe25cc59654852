"""Sources of KV scales, and their precedence."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halfbyte.files import make_private
from halfbyte.kvcache import KVCacheDType, KVRecipe, KVScales
from halfbyte.kvcache.recipe import RECIPES
from halfbyte.models import Cache, calibrate, find_kv_scales, load_model, resolve_kv_scales
from halfbyte.models.choose_kv_scales import cached_calibration
from kvcache.transforms import make_calibration, without_costs
from models.zoo import make_model, token_ids

pytestmark = pytest.mark.usefixtures("cache")

NVFP4 = {KVCacheDType.NVFP4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def scales_of(amax: float, source: str = "test") -> KVScales:
    return KVScales((amax,) * 4, (amax,) * 4, source)


def keep(folder: Path, scales: KVScales) -> Path:
    """Save scales to the cache folder, as `halfbyte calibrate` does for read-only folders."""
    file = cached_calibration(folder)
    assert file is not None
    make_private(file.parent)
    return scales.save_file(file)


def add_scales(folder: Path, name: str, declared: dict | None = None) -> None:
    tensors = {}
    for layer in range(4):
        for side in "kv":
            tensors[name.format(layer=layer, side=side)] = torch.tensor(0.01 * (layer + 1))
    save_file(tensors, folder / "scales.safetensors")
    if declared is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **declared}))


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
    with pytest.raises(ValueError, match=r"kv_scales.json: expected a JSON object"):
        resolve_kv_scales(load_model(folder), NVFP4)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_find_kv_scales_takes_the_first_that_is_there(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    config = config_of(folder)

    def found(given: KVScales | str | Path | None = None) -> tuple[float, str]:
        scales = find_kv_scales(folder, config, given=given)
        assert scales is not None
        return scales.k_amax[0], scales.source

    assert find_kv_scales(folder, config) is None
    file = keep(folder, scales_of(1.0, "kept"))
    assert file.parent == cache / "kv_scales"
    assert found() == (1.0, f"{file} (kept)")
    scales_of(2.0, "stored").save(folder)
    assert found() == (2.0, "kv_scales.json (stored)")
    add_scales(folder, "model.layers.{layer}.self_attn.{side}_scale")
    assert found()[1] == "checkpoint (for fp8_e4m3)"
    other = tmp_path / "other"
    other.mkdir()
    scales_of(4.0, "mine").save(other)
    for given in (other, str(other), other / "kv_scales.json"):
        assert found(given) == (4.0, f"{other}/kv_scales.json (mine)")
    assert found(scales_of(5.0, "user")) == (5.0, "user")


def test_a_calibration_that_is_too_old_for_a_recipe_comes_last(folder: Path) -> None:
    balanced, unweighted = RECIPES["balanced"], replace(RECIPES["balanced"], weighted_scales=False)
    scales = replace(scales_of(1.0, "new"), calibration=make_calibration(layers=4))
    older = replace(scales, source="older", calibration=without_costs(make_calibration(layers=4)))
    config = config_of(folder)

    def found(recipe: KVRecipe) -> str:
        scales = find_kv_scales(folder, config, recipe=recipe)
        return "" if scales is None else scales.source

    older.save(folder)
    assert found(balanced) == found(unweighted) == "kv_scales.json (older)"
    kept = keep(folder, scales)
    assert found(balanced) == f"{kept} (new)"
    assert found(unweighted) == found(RECIPES["plain"]) == "kv_scales.json (older)"


def test_find_kv_scales_of_a_config_as_transformers_has_it(folder: Path) -> None:
    scales_of(2.0).save(folder)
    model = load_model(folder)
    assert find_kv_scales(folder, model.config) == find_kv_scales(folder, config_of(folder))


@pytest.mark.parametrize("is_nested", [True, False])
def test_find_kv_scales_reads_modelopts_declaration(folder: Path, is_nested: bool) -> None:
    add_scales(folder, "model.layers.{layer}.self_attn.{side}_proj.{side}_scale")
    section = {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": section} if is_nested else section)
    )
    scales = find_kv_scales(folder, config_of(folder))
    assert scales is not None
    assert scales.source == "checkpoint (for nvfp4)"
    assert scales.k_amax[1] == pytest.approx(0.02 * 2688, rel=1e-6)


def test_find_kv_scales_keeps_calibrations_by_fingerprint(folder: Path, tmp_path: Path) -> None:
    """A moved folder is the same model; other weights are another model."""
    keep(folder, scales_of(1.0))
    moved = folder.rename(tmp_path / "moved")
    assert find_kv_scales(moved, config_of(moved)) is not None
    tensors = load_file(moved / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, moved / "model.safetensors")
    assert find_kv_scales(moved, config_of(moved)) is None


def test_nothing_is_kept_without_a_cache_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", "")
    assert cached_calibration(folder) is None
    assert find_kv_scales(folder, config_of(folder)) is None


def test_the_cache_folder_is_the_users_alone(folder: Path, cache: Path) -> None:
    keep(folder, scales_of(1.0))
    for private in (cache, cache / "kv_scales"):
        assert private.stat().st_mode & 0o77 == 0


def test_a_cache_folder_of_somebody_elses_is_passed_over(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_dir(path: Path) -> bool:
        if path.is_relative_to(cache):
            raise PermissionError(13, "Permission denied")
        return os.path.isdir(path)

    keep(folder, scales_of(1.0))
    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert find_kv_scales(folder, config_of(folder)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent", r"absent: cannot be read: No such file"),
        ("model", r"model/kv_scales\.json: cannot be read: No such file"),
        ("model/config.json", r"config\.json: not a file of KV scales"),
    ],
)
def test_given_scales_are_never_passed_over(
    folder: Path, tmp_path: Path, given: str, message: str
) -> None:
    add_scales(folder, "model.layers.{layer}.self_attn.{side}_scale")
    with pytest.raises(ValueError, match=message):
        find_kv_scales(folder, config_of(folder), given=tmp_path / given)
    with pytest.raises(ValueError, match=message):
        resolve_kv_scales(make_model("llama"), NVFP4, given=str(tmp_path / given))


def test_scales_for_another_number_of_layers(folder: Path, tmp_path: Path) -> None:
    KVScales((1.0,), (1.0,), "short").save(folder)
    message = r"kv_scales\.json \(short\): 1 layers, the model has 4"
    for config in (config_of(folder), load_model(folder).config):
        with pytest.raises(ValueError, match=message):
            find_kv_scales(folder, config)
    # A config that does not say how many there are (one with several models in it).
    assert find_kv_scales(folder, {"model_type": "gemma3"}) is not None


def test_a_stored_zero_is_refused(folder: Path) -> None:
    file = folder / "kv_scales.json"
    scales_of(1.0).save(folder)
    file.write_text(file.read_text().replace("1.0", "0", 1))
    with pytest.raises(ValueError, match=r"kv_scales\.json: .*k_amax of layer 0 is 0"):
        resolve_kv_scales(load_model(folder), NVFP4)


def test_a_zero_in_the_checkpoint_is_refused(folder: Path) -> None:
    name = "model.layers.2.self_attn.v_scale"
    save_file({name: torch.zeros(1)}, folder / "scales.safetensors")
    with pytest.raises(ValueError, match=rf"scales\.safetensors: {name}: .*above 0, found 0\.0"):
        find_kv_scales(folder, config_of(folder))


def test_resolve_kv_scales_takes_a_file(tmp_path: Path) -> None:
    file = scales_of(3.0).save_file(tmp_path / "mine.json")
    scales = resolve_kv_scales(make_model("llama"), NVFP4, given=file)
    assert scales is not None
    assert scales.k_amax == (3.0,) * 4


def test_scales_of_another_model_with_as_many_layers_are_refused(tmp_path: Path) -> None:
    """Models differ in family or sizes; scales without a model's shape are accepted."""
    path = calibrate(make_model("qwen3"), token_ids(1, 40), "test").save(tmp_path)
    model = make_model("llama")
    assert calibrate(model, token_ids(1, 40), "own").shape["model_type"] == "llama"
    fields = json.loads(path.read_text())
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps({**fields, "model": {"hidden_size": "\x1b[31m8\n"}}))
    with pytest.raises(ValueError, match=r"a model with hidden_size \\x1b\[31m8, this one has 64"):
        find_kv_scales(tmp_path, model.config, given=strange)
    with pytest.raises(ValueError, match="of a model with model_type qwen3, this one has llama"):
        resolve_kv_scales(model, {KVCacheDType.NVFP4}, given=path)
    fields = json.loads(path.read_text())
    del fields["model"]
    path.write_text(json.dumps(fields))
    assert resolve_kv_scales(model, {KVCacheDType.NVFP4}, given=path) is not None


def test_a_fine_tune_takes_its_base_models_scales(tmp_path: Path) -> None:
    scales = calibrate(make_model("llama"), token_ids(1, 40), "test")
    model = make_model("llama", vocab_size=140)
    assert resolve_kv_scales(model, {KVCacheDType.NVFP4}, given=scales) == scales


class TestUnknownNames:
    """Scales in tensors whose names do not tell their direction or unit."""

    NAME = "model.layers.{layer}.self_attn.{side}_scale_inv"

    @pytest.mark.parametrize("load", [load_model, AutoModelForCausalLM.from_pretrained])
    def test_are_refused_where_scales_are_needed(self, folder: Path, load: Any) -> None:
        add_scales(folder, self.NAME, {"quantization_config": None})
        model = load(folder)
        for recipe in (None, "plain", "balanced"):
            with pytest.raises(ValueError, match=r"self_attn\.k_scale_inv: expected the scales of"):
                Cache(model, "nvfp4", kv_recipe=recipe)
        Cache(model, "float32")
        given = Cache(model, "fp8", kv_scales=scales_of(2.0)).kv_scales
        assert given is not None
        assert given.k_amax[0] == 2.0

    @pytest.mark.parametrize("is_kept", [False, True])
    def test_are_named_where_a_calibration_is_used(
        self, folder: Path, is_kept: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        add_scales(folder, self.NAME)
        if is_kept:
            keep(folder, scales_of(3.0))
        else:
            scales_of(3.0).save(folder)
        for recipe in (None, "plain"):  # a plain calibration decides the recipe
            scales = Cache(load_model(folder), "nvfp4", kv_recipe=recipe).kv_scales
            assert scales is not None
            assert scales.k_amax[0] == 3.0
            assert "self_attn.k_scale_inv: not used, because the meaning" in caplog.text
            caplog.clear()


@pytest.mark.parametrize("declared", [None, "FP8", "NVFP4"])
def test_global_scales_are_of_nvfp4_whatever_is_declared(
    folder: Path, declared: str | None
) -> None:
    """compressed-tensors defines `k_global_scale` as 2688 / amax."""
    config = {"quantization_config": declared and {"kv_cache_quant_algo": declared}}
    add_scales(folder, "model.layers.{layer}.self_attn.{side}_global_scale", config)
    scales = find_kv_scales(folder, config_of(folder))
    assert scales is not None
    assert scales.k_amax[1] == pytest.approx(2688 / 0.02, rel=1e-6)
