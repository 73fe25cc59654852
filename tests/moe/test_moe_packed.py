"""Experts in the order of the CUDA kernels: packing and its inverse, in layers, and by default."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from halfbyte.dispatch import Verdict
from halfbyte.moe import SWIGLU, GatedActivation, MoeConfig, PackedExperts, interface
from halfbyte.moe.cuda.kernel import CudaKernel
from halfbyte.moe.cuda.packed import num_tiles, pack_matrices, tile_bytes
from halfbyte.moe.experts import WeightFormat
from moe.cases import LIMITED, random_experts, random_hidden, random_routing
from moe.on_host import BF16, FP16

KINDS: list[tuple[WeightFormat, GatedActivation, torch.dtype]] = [
    ("nvfp4", SWIGLU, BF16),
    ("nvfp4", LIMITED, FP16),
    ("mxfp4", LIMITED, BF16),
    ("mxfp4", SWIGLU, BF16),
]


def experts_with_all_scales(
    weight_format: WeightFormat, activation: GatedActivation, h: int, i: int
) -> PackedExperts:
    """Scales of any value, 0 beside codes that are not 0 among them."""
    experts = random_experts(
        3, h, i, weight_format=weight_format, activation=activation, bias=True, dtype=BF16
    )
    largest = 0x7F if weight_format == "nvfp4" else 256
    generator = torch.Generator().manual_seed(0)
    for matrices in (experts.gate_up, experts.down):
        scales = matrices.scales.view(torch.uint8)
        scales.copy_(torch.randint(largest, scales.shape, generator=generator))
        scales[:, ::3, 0] = 0
        matrices.weight.random_(generator=generator)
    return experts


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("h", "i"), [(32, 32), (224, 96), (128, 160)])
def test_packed_experts_come_back_bit_for_bit(kind: Any, h: int, i: int) -> None:
    weight_format, activation, dtype = kind
    experts = experts_with_all_scales(weight_format, activation, h, i)
    kernel = CudaKernel(MoeConfig.of(experts, dtype))
    tensors = kernel.prepare(experts)
    assert ("down_zeroed_blocks" in tensors) == (weight_format == "nvfp4")
    found = kernel.restore(tensors)
    for name in ("gate_up", "down"):
        ours, theirs = getattr(found, name), getattr(experts, name)
        for part in ("weight", "scales", "global_scale", "bias"):
            mine, given = getattr(ours, part), getattr(theirs, part)
            assert (mine is None) == (given is None)
            assert mine is None or torch.equal(mine.view(torch.uint8), given.view(torch.uint8))


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_packed_experts_take_as_many_bytes_but_for_padding(weight_format: Any) -> None:
    """Channels of gate and up, and K, are multiples of 64 here."""
    experts = random_experts(2, 256, 128, weight_format=weight_format)
    for name, activation in (("gate_up", SWIGLU), ("down", None)):
        matrices = getattr(experts, name)
        packed = pack_matrices(name, matrices, BF16, activation)[f"{name}_packed"]
        tiles = num_tiles(matrices.n, activation is not None)
        assert packed.shape == (2, tiles, tile_bytes(matrices.k, weight_format))
        assert packed.nbytes == matrices.weight.nbytes + matrices.scales.nbytes


@pytest.mark.parametrize(("byte", "name"), [(0x7F, "gate_up"), (0x80, "down")])
def test_scales_without_a_packed_form(byte: int, name: str) -> None:
    experts = random_experts(2, 64, 32)
    getattr(experts, name).scales.view(torch.uint8)[1, 5, 1] = byte
    with pytest.raises(ValueError, match=f"{name}: weight_scale: expected finite block scales"):
        CudaKernel(MoeConfig.of(experts, BF16)).prepare(experts)


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ({"cuda", "triton", "reference"}, "triton"),
        ({"cpu", "reference"}, "reference"),
        (set(), None),
    ],
    ids=["triton", "no-triton", "none"],
)
def test_calls_on_a_gpu_do_not_repack(usable: set[str], expected: str | None) -> None:
    config = replace(MoeConfig(2, 64, 32, BF16), device_type="cuda", compute_capability=90)
    names = ("cuda", "triton", "cpu", "reference")
    verdicts = [Verdict(name, name in usable, "") for name in names]
    with patch.object(interface.MOE_BACKENDS, "explain", lambda *arguments: verdicts):
        assert interface._without_repacking(config) == expected


def test_packages_of_this_machine_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what another machine with such a GPU might have."""
    asked = []
    explain = interface.MOE_BACKENDS.explain

    def recorded(config: Any, compute_capability: int | None = None) -> Any:
        asked.append(compute_capability)
        return explain(config, compute_capability)

    monkeypatch.setattr(interface.MOE_BACKENDS, "explain", recorded)
    interface._without_repacking(MoeConfig(2, 64, 32, BF16))
    assert asked == [None]


def test_calls_on_a_cpu_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_without_repacking", lambda config: pytest.fail("not here"))
    experts, (ids, weights) = random_experts(2, 64, 32), random_routing(3, 1, 2)
    assert interface.moe_experts(
        random_hidden(3, 64, torch.float32), experts, ids, weights
    ).shape == (3, 64)
