"""SwiGLU of an NVFP4 layer's result: inside the GEMM on SM90 where that is fastest, else behind it.

The activation is of values that are rounded to the dtype, as a layer's result is.
"""

from functools import lru_cache, partial

import torch

from halfbyte.elementwise import silu_and_mul
from halfbyte.kernels.runtime.tensor_maps import SHAPES
from halfbyte.linear.ops import linear_op
from halfbyte.linear.w4a16.cuda import Product, call_product, choose_variant, nvfp4_linear_cuda
from halfbyte.linear.w4a16.gemm_sm90.launcher import SWIGLU_MULTIPLE, compile_gemm, gemm_product
from halfbyte.linear.w4a16.gemm_sm90.plan import GemmPlan, make_plan
from halfbyte.linear.w4a16.gpu import gpu_of

_ACTIVATION_MICROSECONDS = 2.0
"""Of `silu_and_mul` between two GEMMs of 64 tokens of Llama-3.1-8B, on an H200; more tokens take
more."""


@linear_op("nvfp4_linear_swiglu_cuda")
def nvfp4_linear_swiglu_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """`silu_and_mul(nvfp4_linear_cuda(x, ..., 2 * n, False))`.

    Args:
        x: `[..., K]`, float16 or bfloat16.
        weight, weight_scale, row_scale: of a `PackedWeight` with n rows of gate, then n of up.
        bias: `[2 * n]` or None.
        n: columns of the result.

    Returns:
        `[..., n]`.
    """
    product = _product(x.shape, n, x.dtype, x.get_device())
    return call_product(product, x, (weight, weight_scale, row_scale), bias, n)


@lru_cache(maxsize=SHAPES)
def _product(shape: torch.Size, n: int, dtype: torch.dtype, device: int) -> Product:
    k = shape[-1]
    m = shape.numel() // k
    gpu = gpu_of(device)
    if gpu.compute_capability == 90 and 2 * n % SWIGLU_MULTIPLE == 0:
        # Now, because a later shape may be new during capture.
        compile_gemm(dtype, device, swiglu=True)
        if m and choose_variant(m, 2 * n, k, gpu) == "gemm":
            plan = swiglu_plan(m, n, k, gpu.num_sms)
            if plan is not None:
                return gemm_product(shape, 2 * n, dtype, device, plan, True)
    return partial(_apart, n)


def swiglu_plan(m: int, n: int, k: int, num_sms: int) -> GemmPlan | None:
    """The plan of the GEMM with SwiGLU; None if a GEMM and an activation take less time."""
    fused = make_plan(2 * n, k, m, num_sms, swiglu=True)
    apart = make_plan(2 * n, k, m, num_sms).microseconds(k, m) + _ACTIVATION_MICROSECONDS
    return fused if fused.microseconds(k, m) < apart else None


def _apart(
    n: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return silu_and_mul(nvfp4_linear_cuda(x, weight, weight_scale, row_scale, bias, 2 * n, False))
