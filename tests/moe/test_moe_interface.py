"""Errors of the interface of MoE layers, and selection of backends."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.dispatch import NoImplementationError
from halfbyte.moe import (
    MOE_BACKENDS,
    ExpertMatrices,
    GatedActivation,
    MoeConfig,
    PackedExperts,
    moe_experts,
    select_moe_kernel,
)
from halfbyte.moe.registry import BACKEND_VARIABLE
from moe.cases import random_experts, random_hidden, random_routing

CONFIG = MoeConfig(num_experts=4, hidden_size=64, intermediate_size=32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 32)}, r"hidden: expected \[M, 64\], got \[3, 32\]"),
        ({"hidden": torch.zeros(3, 64).double()}, "dtype: expected float16, bfloat16 or float32"),
        ({"topk_ids": torch.zeros(2, 2).int()}, r"topk_ids: expected int32 or int64 \[3, top_k\]"),
        ({"topk_ids": torch.zeros(3, 2)}, "topk_ids: expected int32 or int64"),
        ({"topk_ids": torch.zeros(3, 0).int()}, "topk_ids: expected at least one expert"),
        ({"topk_weights": torch.zeros(3, 1)}, r"topk_weights: expected floating point \[3, 2\]"),
        ({"topk_weights": torch.zeros(3, 2).int()}, "topk_weights: expected floating point"),
        ({"topk_ids": torch.zeros(3, 2, device="meta").int()}, "topk_ids: expected a tensor on"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    ids, weights = random_routing(3, 2, 4)
    arguments = {"hidden": random_hidden(3, 64), "topk_ids": ids, "topk_weights": weights}
    with pytest.raises(ValueError, match=message):
        moe_experts(experts=random_experts(), **(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 64, 32)}, "weight: expected uint8"),
        ({"weight": torch.zeros(4, 64, 20).byte()}, "K in multiples of 16 for nvfp4, got K = 40"),
        (
            {"scales": torch.zeros(4, 64, 2).to(torch.float8_e4m3fn)},
            r"scales: expected .*\[4, 64, 4\]",
        ),
        ({"global_scale": None}, r"global_scale: expected float32 \[E, P\] for nvfp4"),
        ({"global_scale": torch.ones(4, 3)}, "global_scale: expected one or two parts"),
        ({"global_scale": torch.ones(3, 2)}, r"global_scale: expected float32 \[4, 2\]"),
        ({"bias": torch.ones(4, 32)}, r"bias: expected .* \[4, 64\], got float32 \[4, 32\]"),
        ({"bias": torch.ones(4, 64, device="meta")}, "expected tensors on one device"),
        ({"scales": torch.zeros(4, 64, 4).half()}, r"scales: expected float8_e4m3fn \(nvfp4\) or"),
        ({"scales": torch.zeros(4, 64, 4).byte()}, r"scales: expected uint8 \[4, 64, 2\]"),
    ],
)
def test_matrices_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(random_experts().gate_up, **change)


def test_experts_that_do_not_fit() -> None:
    experts = random_experts()
    with pytest.raises(ValueError, match=r"down: expected \[E, N, K\] = \[4, 64, 32\]"):
        PackedExperts(experts.gate_up, random_experts(3).down)
    with pytest.raises(ValueError, match="down: expected nvfp4 without bias on cpu, as gate_up is"):
        PackedExperts(experts.gate_up, random_experts(bias=True).down)
    with pytest.raises(ValueError, match="got mxfp4 without bias on cpu"):
        PackedExperts(experts.gate_up, random_experts(weight_format="mxfp4").down)
    two = replace(experts.down, global_scale=torch.ones(4, 2))
    with pytest.raises(ValueError, match="down: expected one global scale"):
        PackedExperts(experts.gate_up, two)
    with pytest.raises(ValueError, match="limit: expected a positive number or None, got 0"):
        GatedActivation(limit=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected a number >= 1, got 0"),
        ({"hidden_size": 40}, "hidden_size: expected a positive multiple of 16 for nvfp4, got 40"),
        ({"intermediate_size": 16, "weight_format": "mxfp4"}, "multiple of 32 for mxfp4, got 16"),
        ({"dtype": torch.float64}, "dtype"),
    ],
)
def test_configs_that_do_not_exist(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_config_of_experts() -> None:
    experts = random_experts(bias=True)
    assert MoeConfig.of(experts, torch.bfloat16) == replace(CONFIG, has_bias=True)


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_moe_kernel(CONFIG, "reference").name == "reference"
    with pytest.raises(NoImplementationError, match="MoE backend: unknown 'nonsense'"):
        select_moe_kernel(CONFIG, "nonsense")
    monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
    with pytest.raises(NoImplementationError, match="HALFBYTE_MOE_BACKEND: MoE backend: unknown"):
        select_moe_kernel(CONFIG)
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    assert select_moe_kernel(CONFIG).name == "reference"


def test_every_backend_answers() -> None:
    for capability in (0, 80, 90, 100, 120):
        for device_type in ("cpu", "cuda"):
            config = replace(CONFIG, device_type=device_type, compute_capability=capability)
            verdicts = MOE_BACKENDS.explain(config, capability)
            assert all(verdict.reason for verdict in verdicts)
            assert "reference" in [verdict.name for verdict in verdicts if verdict.usable]


def test_global_scales_of_rows() -> None:
    scale = torch.tensor([[1.0, 2.0]])
    blocks = torch.zeros(1, 4, 1).to(torch.float8_e4m3fn)
    matrices = ExpertMatrices(torch.zeros(1, 4, 8).byte(), blocks, scale)
    assert matrices.row_scales().tolist() == [[1, 1, 2, 2]]
    assert matrices.row_scales(interleaved=True).tolist() == [[1, 2, 1, 2]]
