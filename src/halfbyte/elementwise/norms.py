"""RMSNorm and SwiGLU: the kernels for tensors of 16 bits on a GPU with rows of a multiple of 8
values, else the same in PyTorch.

All compute in float32 and round every result once. For inference: `backward` is an error.
"""

import ctypes

import torch
import torch.nn.functional as F

from halfbyte.elementwise.operands import (
    as_rows,
    expect,
    load_kernel,
    macros_of,
    normalized,
    operator,
    suits,
)
from halfbyte.kernels.runtime import nvrtc

_MAX_THREADS = 512


class _NormParams(ctypes.Structure):
    """`Params` of `add_rms_norm.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, ctypes.c_uint64) for name in ("x_stride", "residual_stride")),
        ("epsilon", ctypes.c_float),
    )


class _GateParams(ctypes.Structure):
    """`Params` of `silu_and_mul.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_uint64) for name in ("x_stride", "chunks")),
    )


def normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch `add_rms_norm.cu`; see `rms_norm` and `add_rms_norm`."""
    size, rows = x.shape[-1], as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    added = None if residual is None else as_rows(residual)
    weight = as_rows(weight[None])
    threads = min(_MAX_THREADS, -(-(size // 8) // 32) * 32)
    params = _NormParams(
        x=rows.data_ptr(),
        residual=None if added is None else added.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        sum=None if total is None else total.data_ptr(),
        x_stride=rows.stride(0) // 8,
        residual_stride=0 if added is None else added.stride(0) // 8,
        epsilon=epsilon,
    )
    macros = macros_of(x.dtype, SIZE=size, THREADS=threads, ADDS=int(residual is not None))
    if len(rows):
        kernel = load_kernel("add_rms_norm", macros, x.get_device())
        nvrtc.launch(kernel, len(rows), threads, [params], overlap=True)
    return out, total


def gate(x: torch.Tensor) -> torch.Tensor:
    """Launch `silu_and_mul.cu`; see `silu_and_mul`."""
    rows, size = as_rows(x), x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    chunks = out.numel() // 8
    params = _GateParams(rows.data_ptr(), out.data_ptr(), rows.stride(0) // 8, chunks)
    if chunks:
        kernel = load_kernel("silu_and_mul", macros_of(x.dtype, SIZE=size), x.get_device())
        nvrtc.launch(kernel, -(-chunks // 128), 128, [params], overlap=True)
    return out


@operator("rms_norm", lambda x, weight, epsilon: x.new_empty(x.shape))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.

    Args:
        x: float `[..., n]`.
        weight: `[n]`.
        epsilon: added to the mean of squares.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    expect("weight", weight, x.shape[-1:], x)
    if suits(x) and weight.dtype == x.dtype:
        return normalize(x, None, weight, epsilon)[0]
    return normalized(x.float(), weight, epsilon).to(x.dtype).contiguous()


@operator(
    "add_rms_norm",
    lambda x, residual, weight, epsilon: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of `x + residual`, and that sum.

    Args:
        x, residual: float `[..., n]` of one dtype.
        weight: `[n]`.
        epsilon: added to the mean of squares.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    expect("weight", weight, x.shape[-1:], x)
    expect("residual", residual, x.shape, x)
    if suits(x) and weight.dtype == residual.dtype == x.dtype:
        out, total = normalize(x, residual, weight, epsilon)
        assert total is not None
        return out, total
    total = x.float() + residual.float()
    out = normalized(total, weight, epsilon).to(x.dtype)
    return out.contiguous(), total.to(x.dtype).contiguous()


@operator("silu_and_mul", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]`.

    Args:
        x: float `[..., 2 n]`.

    Raises:
        ValueError: an odd number of channels.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of channels, got {x.shape[-1]}")
    if suits(x) and x.shape[-1] % 16 == 0:
        return gate(x)
    first, second = x.float().chunk(2, dim=-1)
    return (F.silu(first) * second).to(x.dtype).contiguous()
