"""Tensors of experts for kernels that run on the CPU, and kinds of experts."""

import torch

from cuda_on_host import guarded
from halfbyte.moe import SWIGLU, GatedActivation, PackedExperts
from halfbyte.moe.as_loaded import MatrixTensors
from halfbyte.moe.experts import ExpertMatrices, WeightFormat
from moe.cases import LIMITED, random_experts

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


def moved_matrices(matrices: ExpertMatrices) -> MatrixTensors:
    """The tensors of matrices, each `moved`."""
    scale, bias = matrices.global_scale, matrices.bias
    return MatrixTensors(
        moved(matrices.weight),
        moved(matrices.scales),
        None if scale is None else moved(scale),
        None if bias is None else moved(bias),
    )


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
