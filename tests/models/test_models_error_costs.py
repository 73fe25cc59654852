"""Weights of errors in K and V: moments of queries, and the output projection's weights."""

import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from checkpoints.folders import load_model, make_folder
from halfbyte.checkpoints import Dialect
from halfbyte.kvcache.calibration import ErrorCosts
from halfbyte.linear import NvFp4Linear
from halfbyte.models import calibrate, key_statistics
from halfbyte.models.layerwise import calibrate_checkpoint
from halfbyte.models.output_energy import output_energy
from halfbyte.numerics import nvfp4
from models.zoo import ARCHITECTURES, make_model, token_ids


def costs_of(model: Any, ids: torch.Tensor, **options: Any) -> list[ErrorCosts]:
    calibration = calibrate(model, ids, "test", **options).calibration
    assert calibration is not None
    found = [layer.costs for layer in calibration.layers]
    return [costs for costs in found if costs is not None]


def rotations_of(model: Any, kind: str | None, count: int) -> torch.Tensor:
    """R_p, float64 `[count, D, D]`: what the model's own RoPE makes of unit vectors, transposed."""
    module = sys.modules[type(model.base_model).__module__]
    size = getattr(model.config, "head_dim", None) or (
        model.config.hidden_size // model.config.num_attention_heads
    )
    positions, units = torch.arange(count), torch.eye(size).expand(1, count, size, size)
    arguments = () if kind is None else (kind,)
    cos, sin = model.base_model.rotary_emb(units, positions[None], *arguments)
    turned, _ = module.apply_rotary_pos_emb(units.transpose(1, 2), units.transpose(1, 2), cos, sin)
    return turned[0].permute(1, 2, 0).double()


def queries_of(model: Any, ids: torch.Tensor) -> dict[int, list[torch.Tensor]]:
    """Queries of each layer and row, `[heads, tokens, D]` after RoPE, as in transformers."""
    seen: dict[int, list[torch.Tensor]] = {}

    def attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.setdefault(module.layer_idx, []).append(query[0].double())
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("seen", attention)
    model.set_attn_implementation("seen")
    with torch.inference_mode():
        for row in ids.split(1):
            model(input_ids=row, use_cache=False)
    return seen


# Without sinks and soft-caps, which that attention does not support.
@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a not in ("gpt_oss", "gemma2")]
)
def test_costs_are_those_of_the_models_queries_and_outputs(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_statistics, "_POSITIONS_OF_QUERIES", 300)
    model = make_model(architecture)
    # No longer than the windows, because that attention gets no mask.
    ids = token_ids(2, 9 if architecture in ("mistral", "gemma3_text") else 40)
    found = costs_of(model, ids, first_tokens=[5, 7])
    assert len(found) == 4
    for layer, rows in queries_of(model, ids).items():
        projection = model.model.layers[layer].self_attn.o_proj.weight.detach().double()
        heads, size = model.config.num_key_value_heads, rows[0].shape[2]
        kinds = model.config.layer_types if architecture == "gemma3_text" else [None] * 4
        rotations = rotations_of(model, kinds[layer], 300)
        moment = torch.zeros(heads, size, size, dtype=torch.float64)
        for head in range(heads):
            for row in rows:
                tokens = row.unflatten(0, (heads, -1))[head].transpose(0, 1)[8:]
                back = torch.linalg.solve(rotations[8 : row.shape[1]], tokens.transpose(1, 2))
                everywhere = rotations[:, None] @ back  # [positions, tokens, D, queries]
                products = torch.einsum("ptdq,pteq->de", everywhere, everywhere)
                moment[head] += products / (len(rotations) * back.shape[0] * back.shape[2])
            moment[head] /= len(rows)
        energy = projection.square().sum(0).unflatten(0, (heads, -1, size)).sum(1)
        expected = ErrorCosts.of(moment, energy)
        for name, tensor in vars(expected).items():
            torch.testing.assert_close(vars(found[layer])[name], tensor, rtol=2e-3, atol=2e-4)


def test_broken_and_silent_heads_cost_as_if_nothing_were_known() -> None:
    model = make_model("llama")
    attention = [layer.self_attn for layer in model.model.layers]
    attention[0].q_proj.weight.data[32:] = 0
    attention[1].o_proj.weight.data[:, :32] = 0
    attention[3].q_proj.weight.data[[3, 19], 5] = math.nan  # both queries of a KV head
    found = costs_of(model, token_ids(1, 60))
    healthy = costs_of(make_model("llama"), token_ids(1, 60))
    assert not found[0].factors[:, 1].any()
    assert (found[0].k_weights[:, 1] == 1).all()
    assert torch.equal(found[0].factors[:, 0], healthy[0].factors[:, 0])
    assert (found[1].v_weights[0] == 1).all()
    assert torch.equal(found[1].v_weights[1], healthy[1].v_weights[1])
    assert not found[3].factors[:, 0].any()
    assert found[3].factors[:, 1].any()
    for costs in found:
        for tensor in vars(costs).values():
            assert tensor.isfinite().all()


def test_short_texts_have_no_queries_to_go_by() -> None:
    for costs in costs_of(make_model("llama"), token_ids(1, 8)):
        assert not costs.factors.any()
        assert (costs.k_weights == 1).all()
        assert not (costs.v_weights == 1).all()


@pytest.mark.parametrize("bias", [False, True])
def test_output_energy_of_layers_of_any_kind(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias)
    expected = linear.weight.detach().double().square().sum(0)
    with patch("halfbyte.models.output_energy._INPUTS_AT_ONCE", 40):
        found = output_energy(linear, 96, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(found, expected)
    packed = NvFp4Linear.from_float(linear)
    weight = nvfp4.dequantize(
        packed.weight, packed.weight_scale, packed.weight_global_scale, torch.float64
    )
    packed_energy = output_energy(packed, 96, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(packed_energy, weight.square().sum(0), rtol=1e-5, atol=1e-8)
    assert not torch.equal(packed_energy, found)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_layer_by_layer_they_are_the_same(
    tmp_path: Path, architecture: str, dialect: Dialect
) -> None:
    folder = make_folder(tmp_path, architecture, dialect)
    for path in (folder.plain, folder.quantized):
        model = load_model(path)
        ids = torch.randint(0, 131, (1, 256), generator=torch.Generator().manual_seed(0))
        layers = calibrate_checkpoint(path, device="cpu", max_tokens=256)
        assert layers.calibration == calibrate(model, ids, "").calibration
        assert layers.calibration is not None
        assert layers.calibration.has_costs
