"""Rotary embedding of q and k, optionally with RMSNorm of each head first.

The kernel for tensors of 16 bits on a GPU whose heads have a multiple of 8 channels, else the same
in PyTorch.

Both compute in float32 and round every result once. For inference: `backward` is an error.
"""

import ctypes
from typing import Any, NamedTuple

import torch

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
from halfbyte.kernels.runtime.parameters import aligned


class _RotaryParams(ctypes.Structure):
    """`Params` of `rotary_embedding.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "query_out", "key_out")),
        *((name, ctypes.c_void_p) for name in ("query_weight", "key_weight")),
        *((name, ctypes.c_void_p) for name in ("positions", "table")),
        *((name, ctypes.c_uint64) for name in ("query_stride", "key_stride")),
        *((name, ctypes.c_uint32) for name in ("tokens", "max_position")),
        ("epsilon", ctypes.c_float),
    )


MAX_NORMED_HEAD = 256
"""Max size of a head that the kernel normalizes: eight channels for each lane of a warp."""


class HeadNorms(NamedTuple):
    """Norms of the heads of q and k."""

    query_weight: torch.Tensor
    """`[head_size]`."""
    key_weight: torch.Tensor
    epsilon: float


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `rotary_embedding.cu`; see `rotary_embedding` and `qk_norm_rotary_embedding`."""
    queries, keys = as_rows(query), as_rows(key)
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    rotary, tokens = table.shape[1], len(queries)
    heads, kv_heads = (x.shape[-1] // head_size for x in (query, key))
    positions = positions.contiguous()
    norm_weights = [] if norms is None else [norms.query_weight, norms.key_weight]
    angles, weights = aligned(table.contiguous()), [as_rows(w[None]) for w in norm_weights]
    # They are read before the previous kernel has ended, which must not be one that copies them.
    pairs = zip([table, *norm_weights], [angles, *weights], strict=True)
    in_place = all(given.data_ptr() == read.data_ptr() for given, read in pairs)
    params = _RotaryParams(
        query=queries.data_ptr(),
        key=keys.data_ptr(),
        query_out=outs[0].data_ptr(),
        key_out=outs[1].data_ptr(),
        query_weight=weights[0].data_ptr() if weights else None,
        key_weight=weights[1].data_ptr() if weights else None,
        positions=positions.data_ptr(),
        table=angles.data_ptr(),
        query_stride=queries.stride(0),
        key_stride=keys.stride(0),
        tokens=tokens,
        max_position=len(table),
        epsilon=0.0 if norms is None else norms.epsilon,
    )
    lanes = _lanes(head_size, norms is not None)
    macros = macros_of(
        query.dtype,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        ROTARY=rotary,
        INTERLEAVED=int(interleaved),
        NORMS=int(norms is not None),
        LANES=lanes,
    )
    threads = tokens * (heads + kv_heads) * lanes
    if tokens:
        kernel = load_kernel("rotary_embedding", macros, query.get_device())
        nvrtc.launch(kernel, -(-threads // 128), 128, [params], overlap=in_place)
    return outs[0], outs[1]


def _lanes(head_size: int, normalizes: bool) -> int:
    """`LANES` of `rotary_embedding.cu`."""
    items = head_size // 8
    return 1 << (items - 1).bit_length() if normalizes else items


def _empty(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


@operator("rotary_embedding", _empty)
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
            channels of a head are rotated. On a GPU it must not be the result of a kernel that may
            still run: it is read before the previous kernel has ended.
        head_size: of query and key.
        interleaved: whether pairs are neighbours; else pair i is channels i and i + r / 2.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    return _apply(positions, query, key, table, head_size, interleaved, None)


@operator("qk_norm_rotary_embedding", _empty)
def qk_norm_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    epsilon: float,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` of heads normalized by `rms_norm`, without rounding in between.

    Args:
        positions, query, key, table, head_size, interleaved: of `rotary_embedding`.
        query_weight, key_weight: of the norms, `[head_size]`; read as early as the table.
        epsilon: of both norms.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        expect(name, weight, (head_size,), query)
    norms = HeadNorms(query_weight, key_weight, epsilon)
    return _apply(positions, query, key, table, head_size, interleaved, norms)


def _apply(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
    norms: HeadNorms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Either operator, on the kernel if that takes these tensors."""
    tokens, rotary = len(positions), table.shape[-1]
    expect("positions", positions, (tokens,), query)
    expect("table", table, (len(table), rotary), query)
    for name, x in (("query", query), ("key", key)):
        expect(name, x, (tokens, x.shape[-1]), query)
        if x.shape[-1] % head_size:
            raise ValueError(f"{name}: expected heads of {head_size}, got {x.shape[-1]} channels")
    if rotary % 2 or rotary > head_size:
        raise ValueError(f"table: expected up to {head_size} columns, an even number, got {rotary}")
    if positions.dtype != torch.int64:
        raise ValueError(f"positions: expected int64, got {positions.dtype}")
    others = [key, table]
    # Threads are counted in 32 bits. They have eight values each, or up to half of them none.
    fits = rotary % 8 == 0 and head_size % 8 == 0 and (query.numel() + key.numel()) // 4 < 2**32
    if norms is not None:
        others += norms[:2]
        fits = fits and head_size <= MAX_NORMED_HEAD
    takes = fits and suits(query) and all(x.dtype == query.dtype for x in others)
    run = rotate if takes else _rotated
    return run(positions, query, key, table, head_size, interleaved, norms)


def _rotated(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    head_size: int,
    interleaved: bool,
    norms: HeadNorms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` computes, in PyTorch."""
    rotary = table.shape[-1]
    cosines, sines = table[positions].float()[:, None].chunk(2, dim=-1)

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        heads = x.float().unflatten(-1, (-1, head_size))
        if norms is not None and weight is not None:
            heads = normalized(heads, weight, norms.epsilon)
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

    weights = (None, None) if norms is None else norms[:2]
    return rotated(query, weights[0]), rotated(key, weights[1])
