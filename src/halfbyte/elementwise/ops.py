"""PyTorch operators: the kernels for tensors of 16 bits on a GPU with rows of a multiple of 8
values, else the same in PyTorch.

All compute in float32 and round every result once. For inference: `backward` is an error.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.operators import make_operator
from halfbyte.kernels.runtime.parameters import aligned

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels take."""
_MAX_THREADS = 512


def _operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operator `torch.ops.halfbyte.<name>`."""
    return partial(make_operator, name, fake=fake)


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


class _RotaryParams(ctypes.Structure):
    """`Params` of `rotary_embedding.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "query_out", "key_out")),
        *((name, ctypes.c_void_p) for name in ("positions", "table")),
        *((name, ctypes.c_uint64) for name in ("query_stride", "key_stride")),
        *((name, ctypes.c_uint32) for name in ("tokens", "max_position")),
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as rows of one stride, aligned to 16 bytes; a copy if necessary."""
    return aligned(x.flatten(0, -2))


def _suits(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_DTYPES and x.shape[-1] % 8 == 0


@lru_cache(maxsize=256)
def _kernel(name: str, macros: tuple[tuple[str, int], ...], device: int) -> nvrtc.Kernel:
    return nvrtc.load(f"elementwise/{name}.cu", macros, ((name, 0),), device)[name]


def _macros(dtype: torch.dtype, **more: int) -> tuple[tuple[str, int], ...]:
    return (("X_BF16", int(dtype == torch.bfloat16)), *more.items())


def normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch `add_rms_norm.cu`; see `rms_norm` and `add_rms_norm`."""
    size, rows = x.shape[-1], _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    added = None if residual is None else _rows(residual)
    weight = _rows(weight[None])
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
    macros = _macros(x.dtype, SIZE=size, THREADS=threads, ADDS=int(residual is not None))
    if len(rows):
        kernel = _kernel("add_rms_norm", macros, x.get_device())
        nvrtc.launch(kernel, len(rows), threads, [params], overlap=True)
    return out, total


def gate(x: torch.Tensor) -> torch.Tensor:
    """Launch `silu_and_mul.cu`; see `silu_and_mul`."""
    rows, size = _rows(x), x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    chunks = out.numel() // 8
    params = _GateParams(rows.data_ptr(), out.data_ptr(), rows.stride(0) // 8, chunks)
    if chunks:
        kernel = _kernel("silu_and_mul", _macros(x.dtype, SIZE=size), x.get_device())
        nvrtc.launch(kernel, -(-chunks // 128), 128, [params], overlap=True)
    return out


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `rotary_embedding.cu`; see `rotary_embedding`."""
    queries, keys = _rows(query), _rows(key)
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    rotary, tokens = table.shape[1], len(queries)
    heads, kv_heads = (x.shape[-1] // head_size for x in (query, key))
    positions, table = positions.contiguous(), aligned(table.contiguous())
    params = _RotaryParams(
        query=queries.data_ptr(),
        key=keys.data_ptr(),
        query_out=outs[0].data_ptr(),
        key_out=outs[1].data_ptr(),
        positions=positions.data_ptr(),
        table=table.data_ptr(),
        query_stride=queries.stride(0),
        key_stride=keys.stride(0),
        tokens=tokens,
        max_position=len(table),
    )
    macros = _macros(
        query.dtype,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        ROTARY=rotary,
        INTERLEAVED=int(interleaved),
    )
    threads = tokens * (heads + kv_heads) * (rotary // 8 + (head_size - rotary) // 8)
    if tokens:
        kernel = _kernel("rotary_embedding", macros, query.get_device())
        nvrtc.launch(kernel, -(-threads // 128), 128, [params], overlap=True)
    return outs[0], outs[1]


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Raise ValueError for another shape, or another device than that of `like`."""
    if tuple(x.shape) != shape or x.device != like.device:
        raise ValueError(
            f"{name}: expected {list(shape)} on {like.device}, got {list(x.shape)} on {x.device}"
        )


def _normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


@_operator("rms_norm", lambda x, weight, epsilon: x.new_empty(x.shape))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.

    Args:
        x: float `[..., n]`.
        weight: `[n]`.
        epsilon: added to the mean of squares.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    _expect("weight", weight, x.shape[-1:], x)
    if _suits(x) and weight.dtype == x.dtype:
        return normalize(x, None, weight, epsilon)[0]
    return _normalized(x.float(), weight, epsilon).to(x.dtype).contiguous()


@_operator(
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
    _expect("weight", weight, x.shape[-1:], x)
    _expect("residual", residual, x.shape, x)
    if _suits(x) and weight.dtype == residual.dtype == x.dtype:
        out, total = normalize(x, residual, weight, epsilon)
        assert total is not None
        return out, total
    total = x.float() + residual.float()
    out = _normalized(total, weight, epsilon).to(x.dtype)
    return out.contiguous(), total.to(x.dtype).contiguous()


@_operator("silu_and_mul", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]`.

    Args:
        x: float `[..., 2 n]`.

    Raises:
        ValueError: an odd number of channels.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of channels, got {x.shape[-1]}")
    if _suits(x) and x.shape[-1] % 16 == 0:
        return gate(x)
    first, second = x.float().chunk(2, dim=-1)
    return (F.silu(first) * second).to(x.dtype).contiguous()


@_operator(
    "rotary_embedding",
    lambda positions, query, key, table, head_size, interleaved: (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
    ),
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with pairs (a, b) of channels rotated: (a cos - b sin, b cos + a sin).

    Args:
        positions: int64 `[tokens]`.
        query, key: float `[tokens, heads * head_size]`, of one dtype.
        table: of that dtype, `[max_position, r]`: r / 2 cosines, then r / 2 sines. The first r
            channels of a head are rotated.
        head_size: of query and key.
        interleaved: whether pairs are neighbours; else pair i is channels i and i + r / 2.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    tokens, rotary = len(positions), table.shape[-1]
    _expect("positions", positions, (tokens,), query)
    _expect("table", table, (len(table), rotary), query)
    for name, x in (("query", query), ("key", key)):
        _expect(name, x, (tokens, x.shape[-1]), query)
        if x.shape[-1] % head_size:
            raise ValueError(f"{name}: expected heads of {head_size}, got {x.shape[-1]} channels")
    if rotary % 2 or rotary > head_size:
        raise ValueError(f"table: expected up to {head_size} columns, an even number, got {rotary}")
    if positions.dtype != torch.int64:
        raise ValueError(f"positions: expected int64, got {positions.dtype}")
    sizes = rotary % 8 == 0 and head_size % 8 == 0
    threads = (query.numel() + key.numel()) // 4
    if _suits(query) and key.dtype == table.dtype == query.dtype and sizes and threads < 2**32:
        return rotate(positions, query, key, table, head_size, interleaved)
    cosines, sines = table[positions].float()[:, None].chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.float().unflatten(-1, (-1, head_size))
        turning, rest = heads[..., :rotary], heads[..., rotary:]
        if interleaved:
            a, b = turning[..., ::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, dim=-1)
        turned = a * cosines - b * sines, b * cosines + a * sines
        if interleaved:
            joined = torch.stack(turned, dim=-1).flatten(-2)
        else:
            joined = torch.cat(turned, dim=-1)
        return torch.cat([joined, rest], dim=-1).to(x.dtype).reshape(x.shape)

    return rotated(query), rotated(key)
