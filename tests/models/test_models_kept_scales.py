"""KV scales are those that a checkpoint's folder had when its model was loaded."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import halfbyte
from checkpoints.folders import load_model, make_folder
from halfbyte.checkpoints import DIALECTS
from halfbyte.files import make_private
from halfbyte.kvcache import KVScales
from halfbyte.models import ModelLoadError, calibrate
from halfbyte.models.choose_kv_scales import cached_calibration
from kvcache.transforms import make_calibration, without_costs
from models.zoo import make_model, token_ids

pytestmark = pytest.mark.usefixtures("cache")

LOADERS: dict[str, Any] = {
    "load_model": load_model,
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A checkpoint that `load_model` and, by our quantizer, `from_pretrained` load."""
    path = make_folder(tmp_path / "a", "llama", "modelopt").quantized
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["provider"] = "halfbyte"
    (path / "config.json").write_text(json.dumps(config))
    return path


def scales_of(amax: float) -> KVScales:
    return KVScales((amax,) * 4, (amax / 2,) * 4, "test")


def k_amax(model: Any, **options: Any) -> float:
    scales = halfbyte.Cache(model, "fp8", **options).kv_scales
    assert scales is not None
    return scales.k_amax[0]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("change", ["rewritten", "removed", "moved", "another folder"])
def test_a_file_is_read_at_loading(quantized: Path, loader: str, change: str) -> None:
    scales_of(3.0).save(quantized)
    model = LOADERS[loader](quantized)
    if change == "rewritten":
        scales_of(5.0).save(quantized)
    elif change == "removed":
        (quantized / "kv_scales.json").unlink()
    else:
        quantized.rename(quantized.with_name("moved"))
        if change == "another folder":
            make_model("llama").save_pretrained(quantized)
            scales_of(5.0).save(quantized)
    assert k_amax(model) == 3.0


@pytest.mark.parametrize("loader", LOADERS)
def test_a_later_file_is_the_loaded_checkpoint_s_or_passed_over(
    quantized: Path, loader: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = LOADERS[loader](quantized)
    scales_of(5.0).save(quantized)
    assert k_amax(model) == 5.0
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    assert k_amax(model) != 5.0
    assert "kv_scales.json: not used, because the folder's checkpoint is not" in caplog.text


def test_a_later_calibration_serves_other_recipes(quantized: Path) -> None:
    whole = replace(scales_of(3.0), calibration=make_calibration(layers=4))
    assert whole.calibration is not None
    replace(whole, calibration=without_costs(whole.calibration)).save(quantized)
    model = load_model(quantized)
    calibrate(model, token_ids(1, 40), "anew").save(quantized)
    scales = halfbyte.Cache(model, "nvfp4").kv_scales
    assert scales is not None
    assert scales.source == "kv_scales.json (anew)"
    assert k_amax(model) == 3.0


@pytest.mark.parametrize("loader", LOADERS)
def test_a_cached_calibration_is_the_loaded_checkpoint_s(quantized: Path, loader: str) -> None:
    file = cached_calibration(quantized)
    assert file is not None
    make_private(file.parent)
    scales_of(3.0).save_file(file)
    model = LOADERS[loader](quantized)
    shutil.rmtree(quantized)
    assert k_amax(model) == 3.0


def test_a_broken_file_is_an_error_where_its_scales_are_needed(quantized: Path) -> None:
    (quantized / "kv_scales.json").write_text("{")
    model = load_model(quantized)
    (quantized / "kv_scales.json").unlink()
    halfbyte.Cache(model, "float32")
    assert k_amax(model, kv_scales=scales_of(2.0)) == 2.0
    with pytest.raises(ValueError, match=r"kv_scales.json: expected a JSON object"):
        halfbyte.Cache(model, "fp8")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_relative_path_is_kept_by_from_pretrained(
    tmp_path: Path, dialect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "q", "llama", dialect)
    config = json.loads((folder.quantized / "config.json").read_text())
    folder.config(quantization_config={**config["quantization_config"], "provider": "halfbyte"})
    names = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(4) for x in "kv"]
    scales = {name: torch.tensor(0.05) for name in names}
    folder.change(lambda tensors: tensors.update(scales))
    monkeypatch.chdir(tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained("quantized")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert k_amax(model) == pytest.approx(0.05 * 448)


def test_a_declaration_in_modelopts_file_stays_with_the_model(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "modelopt", "quant_algo": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    scales_of(3.0).save(tmp_path)
    for load in LOADERS.values():
        assert halfbyte.Cache(load(tmp_path), "auto").pool.layout(0).k_dtype == "fp8_e4m3"


class TestModelsThatTransformersLoads:
    """Only the name of the folder stays with them."""

    def load(self, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        make_model("llama").save_pretrained(folder / name)
        scales_of(3.0).save(folder / name)
        monkeypatch.chdir(folder)
        return AutoModelForCausalLM.from_pretrained(name if name != "absolute" else folder / name)

    @pytest.mark.parametrize("name", ["model", "./model", "a/b/model"])
    def test_a_relative_folder_that_is_gone_is_refused(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.load(tmp_path, name, monkeypatch)
        assert k_amax(model) == 3.0
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        message = rf"{name}: expected the folder that the model was loaded from, found none in "
        with pytest.raises(ModelLoadError, match=message):
            halfbyte.Cache(model, "fp8")
        with pytest.raises(ModelLoadError, match=message):
            halfbyte.LLM(model, kv_cache_dtype="nvfp4", num_pages=8)
        halfbyte.Cache(model, "float32")
        assert k_amax(model, kv_scales=scales_of(2.0)) == 2.0

    @pytest.mark.parametrize("is_there", [True, False])
    def test_modelopt_s_file_alone_declares_their_cache(
        self, tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.load(tmp_path, "model", monkeypatch)
        declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(declared))
        if not is_there:
            (tmp_path / "model").rename(tmp_path / "moved")
        cache = halfbyte.Cache(model, "auto")
        assert cache.pool.layout(0).k_dtype == ("fp8_e4m3" if is_there else "float32")

    def test_a_deleted_folder_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.load(tmp_path, "absolute", monkeypatch)
        shutil.rmtree(tmp_path / "absolute")
        with pytest.raises(ModelLoadError, match="absolute: expected the folder that the model"):
            halfbyte.Cache(model, "fp8")

    def test_a_folder_that_may_be_a_hub_id_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = self.load(tmp_path, "models/llama", monkeypatch)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        with caplog.at_level(logging.WARNING, logger="halfbyte"):
            halfbyte.Cache(model, "fp8")
        assert "models/llama: neither a folder here nor in the hub's cache" in caplog.text

    def test_another_model_s_folder_of_the_same_name_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.load(tmp_path, "model", monkeypatch)
        make_model("llama", head_dim=32).save_pretrained(tmp_path / "other" / "model")
        monkeypatch.chdir(tmp_path / "other")
        with pytest.raises(ModelLoadError, match=r"model: expected .* head_dim 16, found 32"):
            halfbyte.Cache(model, "fp8")
