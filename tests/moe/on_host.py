"""Tensors of experts for kernels that run on the CPU, and kinds of experts."""

import torch

from cuda_on_host import guarded
from halfbyte.moe import SWIGLU, GatedActivation, PackedExperts
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.experts import WeightFormat
from moe.cases import LIMITED, packed_matrices, random_experts

BF16, FP16 = torch.bfloat16, torch.float16
Kind = tuple[WeightFormat, GatedActivation, bool, torch.dtype]
KINDS: dict[str, Kind] = {
    "swiglu": ("nvfp4", SWIGLU, False, BF16),
    "limited-fp16": ("nvfp4", LIMITED, True, FP16),
    "mxfp4-limited": ("mxfp4", LIMITED, True, BF16),
}


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, directly followed by unmapped memory."""
    if not tensor.numel():
        return tensor
    raw = tensor.contiguous().view(torch.uint8)
    return guarded(raw.shape, torch.uint8).copy_(raw).view(tensor.dtype)


def packed_on_host(experts: PackedExperts, dtype: torch.dtype) -> tuple[PackedMatrix, PackedMatrix]:
    """`packed_matrices`, each tensor `moved`."""
    return packed_matrices(experts, dtype, moved)


def experts_of(kind: Kind, num_experts: int, h: int, i: int) -> PackedExperts:
    """Random experts of a kind."""
    weight_format, activation, bias, dtype = kind
    return random_experts(
        num_experts,
        h,
        i,
        weight_format=weight_format,
        activation=activation,
        bias=bias,
        dtype=dtype,
    )


def spoil(experts: PackedExperts, numbers: list[int]) -> None:
    """Make the scales of some experts NaN or as large as they can be."""
    for matrices in (experts.gate_up, experts.down):
        assert matrices.global_scale is not None
        matrices.global_scale[numbers] = torch.nan
        matrices.scales.view(torch.uint8)[numbers] = 0x7E
