"""The default recipe of a cache."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halfbyte import LLM, Cache, load_model
from halfbyte.evaluation import evaluate_perplexity
from halfbyte.kvcache import KV_SCALES_FILE, KVScales
from halfbyte.models import calibrate, local_files
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


def test_a_recipe_is_plain_for_formats_that_it_does_not_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model("llama")
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        llm = LLM(model, kv_cache_dtype="fp4_block16", kv_recipe="balanced", num_pages=8)
        assert llm.recipe.name == "plain"
        expected = "kv_recipe balanced changes NVFP4 only, so kv_recipe is plain for fp4_block16"
        assert caplog.messages == [expected]
        caplog.clear()
        results = evaluate_perplexity(
            model, [token_ids(40).tolist()], ["fp8"], 512, kv_recipes=["plain", "balanced"]
        )
        assert [result.kv_recipe for result in results] == ["plain"]
        assert caplog.messages == [expected.replace("fp4_block16", "fp8_e4m3")]
        caplog.clear()
        assert Cache(model, "fp4_block16", kv_recipe="plain").recipe.name == "plain"
        # Block scales of V in NVFP4 are chosen by the recipe.
        mixed = Cache(model, "bfloat16", v_cache_dtype="nvfp4", kv_recipe="balanced")
        assert mixed.recipe.name == "balanced"
        assert not caplog.messages


def test_scales_of_k_as_it_is_mean_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        assert Cache(model, "nvfp4", kv_scales=PLAIN_SCALES).recipe.name == "plain"
        (message,) = caplog.messages
        assert message.startswith(
            "KV cache scales from user have no recipe statistics (means of K, first tokens, error "
            "weights), so kv_recipe is plain; "
        )
        assert "`halfbyte calibrate MODEL`" in message
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


def test_a_model_s_folder_stays_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `chdir`, and with a hub id."""
    small = make_model("llama")
    small.save_pretrained(tmp_path / "model")
    PLAIN_SCALES.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    loaded = load_model("model")
    by_hub = AutoModelForCausalLM.from_pretrained("model")
    monkeypatch.chdir(tmp_path.parent)
    asked: list[tuple[str, object]] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["local_files_only"]))
        return str(tmp_path / "model")

    monkeypatch.setattr(local_files, "snapshot_download", download)
    for model, name in ((loaded, "model"), (by_hub, "somebody/model")):
        model.config._name_or_path = name
        cache = Cache(model, "fp8")
        assert cache.kv_scales is not None
        assert cache.kv_scales.k_amax == PLAIN_SCALES.k_amax
    assert set(asked) == {("somebody/model", True)}
    by_hub.config._name_or_path = "nobody/nothing"
    monkeypatch.undo()
    cache = Cache(by_hub, "fp8")
    assert cache.kv_scales is not None
    assert cache.kv_scales.k_amax != PLAIN_SCALES.k_amax


def test_scales_with_a_calibration_win_over_a_checkpoint_s_own(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        for side in "kv":
            name = f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
            tensors[name] = torch.tensor(0.05)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    assert Cache(model, "nvfp4").recipe.name == "plain"
    calibrate(model, token_ids(1, 40), "a test").save(tmp_path)
    cache = Cache(model, "nvfp4")
    assert cache.recipe.name == "balanced"
    assert cache.kv_scales is not None
    assert cache.kv_scales.source.startswith(KV_SCALES_FILE)
    of_plain = Cache(model, "nvfp4", kv_recipe="plain").kv_scales
    assert of_plain is not None
    assert of_plain.source.startswith("checkpoint")


@pytest.mark.parametrize(("amax", "is_odd"), [(750_000.0, True), (1e-5, True), (448.0, False)])
def test_scales_of_another_unit_are_reported(
    amax: float, is_odd: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for K and one for V, for any number of layers."""
    scales = KVScales((9.0, amax, amax, 9.0), (7.0,) * 4, "user")
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        Cache(make_model("llama"), "fp8", kv_scales=scales)
    expected = (
        f"KV scales from user: layer 1 has a scale for |K| up to {amax:g}; is it an encode scale"
    )
    assert [m.startswith(expected) for m in caplog.messages] == [True] * is_odd
