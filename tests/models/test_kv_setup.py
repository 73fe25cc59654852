"""Which recipe a cache has where nobody says so."""

import logging
from pathlib import Path

import pytest

from halfbyte import LLM, Cache
from halfbyte.kvcache import KV_SCALES_FILE, KVScales
from halfbyte.models import calibrate
from halfbyte.models.key_statistics import KVRecorder
from halfbyte.models.kv_setup import default_recipe
from models.zoo import make_model, token_ids

PLAIN_SCALES = KVScales((9.0,) * 4, (7.0,) * 4, "user")


def test_nvfp4_is_balanced_and_other_formats_have_no_recipe() -> None:
    model = make_model("llama")
    assert Cache(model, "nvfp4").recipe.name == "balanced"
    assert LLM(model, kv_cache_dtype="nvfp4", num_pages=8).recipe.name == "balanced"
    for dtype in ("fp8", "bfloat16", "fp4_block16"):
        assert Cache(model, dtype).recipe.name == "plain"
    assert Cache(model, "fp8", v_cache_dtype="nvfp4").recipe.name == "plain"
    assert Cache(model, ["bfloat16"] * 3 + ["nvfp4"]).recipe.center


def test_scales_of_k_as_it_is_mean_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        assert Cache(model, "nvfp4", kv_scales=PLAIN_SCALES).recipe.name == "plain"
        (message,) = caplog.messages
        assert message.startswith("KV cache scales from user are for K as it is: kv_recipe plain; ")
        assert "`halfbyte calibrate`" in message
        caplog.clear()
        assert Cache(model, "fp8", kv_scales=PLAIN_SCALES).recipe.name == "plain"
        assert not caplog.messages  # nothing was lost
    measured = calibrate(model, token_ids(1, 40), "a test")
    assert Cache(model, "nvfp4", kv_scales=measured).recipe.name == "balanced"
    assert default_recipe(model, measured, "flashinfer").name == "plain"
    with pytest.raises(ValueError, match="balanced: needs a calibration of K"):
        Cache(model, "nvfp4", kv_scales=PLAIN_SCALES, kv_recipe="balanced")


def test_what_a_folder_has_decides(tmp_path: Path) -> None:
    model = make_model("llama")
    model.config._name_or_path = str(tmp_path)
    PLAIN_SCALES.save(tmp_path)
    assert Cache(model, "nvfp4").recipe.name == "plain"
    calibrate(model, token_ids(1, 40), "a test").save(tmp_path)
    cache = Cache(model, "nvfp4")
    assert cache.recipe.name == "balanced"
    assert cache.kv_scales is not None
    assert cache.kv_scales.source.startswith(KV_SCALES_FILE)


def test_a_model_whose_k_cannot_be_measured_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no rotary embedding")

    monkeypatch.setattr(KVRecorder, "calibration", refuse)
    cache = Cache(make_model("llama"), "nvfp4")
    assert cache.recipe.name == "plain"
    assert cache.pool.layout(0).k_dtype == "nvfp4"
