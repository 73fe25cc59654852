"""Calibration: max magnitudes of K and V over a text, and scales from them."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from halfbyte.assets import bundled_model_path, calibration_text
from halfbyte.models import calibrate, load_tokenizer
from halfbyte.models.attention_functions import GENERATE
from halfbyte.models.kv_calibration import (
    calibration_tokens,
    measure_amax,
    read_calibration_text,
    scales_from_amax,
)
from models.zoo import ARCHITECTURES, make_model, token_ids


def test_calibrate_records_what_passes_through_the_cache() -> None:
    model = make_model("llama")
    ids = token_ids(1, 50)
    scales = calibrate(model, ids, "test")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calibrate_records_what_an_ordinary_cache_gets(
    architecture: str, dtype: torch.dtype
) -> None:
    """Bit for bit: the recorder keeps nothing, which must not change what later layers see."""
    model = make_model(architecture, dtype)
    ids = token_ids(1, 50)
    amax = measure_amax(model, ids)
    model.set_attn_implementation(GENERATE)
    with torch.inference_mode():
        cache = model(input_ids=ids, past_key_values=DynamicCache()).past_key_values
    assert amax == [
        (float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers
    ]


def test_calibrate_runs_rows_one_by_one() -> None:
    model = make_model("llama")
    ids = token_ids(3, 20)
    rows = [calibrate(model, row, "") for row in ids.split(1)]
    together = calibrate(model, ids, "")
    for layer in range(4):
        expected = [max(side) for side in zip(*(r.amax_of_layer(layer) for r in rows), strict=True)]
        assert list(together.amax_of_layer(layer)) == expected


def silence(model: Any, *layers: int) -> None:
    for layer in layers:
        model.model.layers[layer].self_attn.v_proj.weight.data.zero_()


def test_a_silent_layer_gets_the_median_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    silence(model, 1)
    measured = measure_amax(model, token_ids(1, 30))
    assert measured[1][1] == 0
    scales = calibrate(model, token_ids(1, 30), "test", headroom=2.0)
    assert scales.k_amax == tuple(2 * k for k, _ in measured)
    v = [v for _, v in measured]
    assert scales.v_amax == (2 * v[0], 2 * sorted([v[0], v[2], v[3]])[1], 2 * v[2], 2 * v[3])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "test: V is all zero in layer 1; scaled by the other layers' median" in record.message


def test_a_side_that_is_silent_everywhere_is_an_error() -> None:
    model = make_model("llama")
    silence(model, *range(4))
    with pytest.raises(ValueError, match="test: V is zero in every layer"):
        calibrate(model, token_ids(1, 30), "test")


def test_scales_from_amax() -> None:
    scales = scales_from_amax([(0.0, 4.0), (1.0, 0.0), (3.0, 0.0), (0.0, 8.0)], "test", 2.0)
    assert scales.k_amax == (4.0, 2.0, 6.0, 4.0)
    assert scales.v_amax == (8.0, 12.0, 12.0, 16.0)
    assert scales.source == "test"


@pytest.mark.parametrize("row", [0, 1])
def test_what_is_not_finite_is_an_error(row: int) -> None:
    """Also if other rows are finite."""
    model = make_model("llama")
    ids = token_ids(2, 10)
    ids[row, 4] = 1  # no other id is
    model.model.embed_tokens.weight.data[1] = math.nan
    with pytest.raises(ValueError, match=r"largest \|K\| of layer 0 is nan"):
        calibrate(model, ids, "test")


@pytest.mark.parametrize(
    ("positions", "max_tokens", "shape"),
    [
        (8192, None, (1, 2048)),
        (256, None, (1, 256)),
        (8192, 100, (1, 100)),
        (256, 300, (2, 150)),
        (256, 513, (3, 171)),
        (1000, 2500, (3, 833)),
    ],
)
def test_calibration_tokens(positions: int, max_tokens: int | None, shape: tuple[int, int]) -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    config = make_model("llama", max_position_embeddings=256).config
    config.max_position_embeddings = positions
    text = calibration_text() * 3
    ids, source = calibration_tokens(tokenizer, config, text, "a text", max_tokens)
    assert ids.shape == shape
    assert source == f"calibration on {shape[0] * shape[1]} tokens of a text"
    assert torch.equal(
        ids.flatten(), tokenizer(text, return_tensors="pt").input_ids[0, : ids.numel()]
    )


def test_calibration_tokens_of_a_short_text_and_of_none() -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    config = make_model("llama").config
    ids, _ = calibration_tokens(tokenizer, config, "import os", max_tokens=100_000)
    assert 1 < ids.shape[1] < 9
    ids, source = calibration_tokens(None, config, "import os", max_tokens=100_000)
    assert ids.shape == (1, 256)
    assert source == "calibration on 256 fixed token ids (the model has no tokenizer)"


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_calibration_tokens_needs_some(max_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"max_tokens: expected a number above 0, got {max_tokens}"
    ):
        calibration_tokens(None, make_model("llama").config, "", max_tokens=max_tokens)


def test_read_calibration_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("x = 'é'\r\n".encode())
    assert read_calibration_text(file, "text") == "x = 'é'\r\n"
    assert read_calibration_text(None, "text") == calibration_text()
    for content, message in ((b"\xff", "is not UTF-8 text"), (b" \n", "is empty, expected a text")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"text: {file}: {message}"):
            read_calibration_text(file, "text")
