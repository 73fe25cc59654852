"""SQNR and errors of attention logits by layer, compared with eager attention."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from halfbyte.evaluation import LayerResult, evaluate_layers
from halfbyte.kvcache import KVScales
from halfbyte.numerics import fp8, nvfp4
from models.zoo import make_model, token_ids

AMAX = 12.0
WINDOWS = [token_ids(1, n, seed=n)[0].tolist() for n in (70, 1, 33)]


def through_nvfp4(x: torch.Tensor) -> torch.Tensor:
    scale = AMAX / (6 * 448)
    return nvfp4.dequantize(*nvfp4.quantize(x, scale), scale, torch.float32)


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    scale = AMAX / 448
    return fp8.dequantize(fp8.quantize(x, scale), scale)


ROUND_TRIPS = {"nvfp4": through_nvfp4, "fp8_e4m3": through_fp8}


@torch.inference_mode()
def expected(
    name: str, round_trip: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, tuple[float, ...]]:
    """SQNR of K and V in dB and error of logits, by layer, from weights of eager attention.

    The log of the ratio of weights, with rounded and with exact keys, is the error of a logit plus
    a constant of the row (also with a sink), which does not change the variance.
    """
    variances: dict[int, list[torch.Tensor]] = {}
    energies: dict[int, torch.Tensor] = {}

    def spy(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, query, key, value, mask, **options)
        _, others = eager(module, query, round_trip(key), value, mask, **options)
        p, p2 = (torch.cat([w, 1 - w.sum(-1, keepdim=True)], -1) for w in (weights, others))
        p, p2 = p.double(), p2.double()
        is_seen = (p > 1e-6) & (p2 > 0)
        d = torch.where(is_seen, (p2 / p).log(), 0.0)
        p = torch.where(is_seen, p, 0.0)
        mean = (p * d).sum(-1, keepdim=True)
        layer = module.layer_idx
        assert isinstance(layer, int)
        variances.setdefault(layer, []).append((p * (d - mean).square()).sum(-1).flatten())
        sums = [x.double().square().sum() for x in (key, round_trip(key) - key)]
        sums += [x.double().square().sum() for x in (value, round_trip(value) - value)]
        energies[layer] = energies.get(layer, torch.zeros(4)) + torch.stack(sums)
        return out, weights

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", eager_mask)
    model = make_model(name)
    model.set_attn_implementation("spy")
    for window in WINDOWS:
        model(input_ids=torch.tensor([window]), use_cache=False)
    found = {}
    for layer, (k, k_noise, v, v_noise) in energies.items():
        error = torch.cat(variances[layer]).mean().sqrt()
        sqnr = (10 * torch.log10(x / noise) for x, noise in ((k, k_noise), (v, v_noise)))
        found[layer] = (*map(float, sqnr), float(error))
    return found


@pytest.mark.parametrize("dtype", ROUND_TRIPS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])  # a soft-cap; sinks; windows
def test_errors_are_those_of_eager_attention(name: str, dtype: str) -> None:
    wanted = expected(name, ROUND_TRIPS[dtype])
    model = make_model(name)
    layers = len(wanted)
    scales = KVScales((AMAX,) * layers, (AMAX,) * layers, "the test")
    results = evaluate_layers(model, WINDOWS, [dtype], kv_scales=scales, kv_recipes=["plain"])
    assert [result.layer for result in results] == list(range(layers))
    for result in results:
        found = (result.k_sqnr_db, result.v_sqnr_db, result.logit_error)
        assert found == pytest.approx(wanted[result.layer], rel=2e-3)
    assert model.config._attn_implementation == "eager"


def of_first_layer(length: int, **options: Any) -> LayerResult:
    window = token_ids(1, length, seed=7)[0].tolist()
    return evaluate_layers(make_model("llama"), [window], **options)[0]


def test_the_last_tokens_in_16_bits_have_no_error() -> None:
    options: dict[str, Any] = {"kv_cache_dtypes": ["nvfp4"], "kv_recipes": ["balanced"]}
    inside, beyond = (of_first_layer(length, **options) for length in (64, 80))
    assert inside.logit_error == 0 < beyond.logit_error
    assert 10 < inside.k_sqnr_db < 40  # packed nevertheless


def test_a_cache_in_the_model_s_dtype_is_exact() -> None:
    result = of_first_layer(20, kv_cache_dtypes=["float32"])
    assert (result.k_sqnr_db, result.v_sqnr_db) == (math.inf, math.inf)
    assert result.logit_error == 0


@pytest.mark.parametrize("windows", [[], [[]], [[1] * 10**4]])
def test_windows_that_cannot_be_measured(windows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="windows: expected one or more of 1 to 256 tokens"):
        evaluate_layers(make_model("llama"), windows, ["nvfp4"])
