"""x times NVFP4 weights in Triton, W4A16, on the weights as they were loaded.

A program computes a tile of the output and loops over k. It decodes its tile of weights, without
the global scale, to the dtype of x, where `e2m1 * block_scale` is exact up to a power of two
(`formats/decode.py`), and multiplies on tensor cores with float32 accumulators. The power of two,
the row's global scale and the bias are applied at the end, then the result is rounded once.

No split-K: the order of summation is fixed per tile size, and every launch gives the same bits. The
batch-invariant mode has one tile size for any M, so that a token's bits do not depend on the
others."""

# mypy: disable-error-code="no-untyped-def"

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.dispatch import compute_capability_of
from halfbyte.kernels.formats.decode import (
    e4m3_to_float16,
    e8m0_fp4_to_bfloat16,
    nvfp4_to_float16,
    spread,
)
from halfbyte.kernels.runtime.devices import current_device

_BLOCK = tl.constexpr(16)
"""Values that share a scale."""
_SHARED_WEIGHTS = 8
"""Tiles of M that run next to each other, so that they share weights in L2."""
_OPERANDS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Tiles(NamedTuple):
    """Tile sizes (`m` tokens, `n` rows of the weight, `k` per step) and Triton's launch options."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Chosen by compiling for SM80, SM90, SM100 and SM120, not by timing: no spilled registers, few
# instructions per weight, and (except for float32) asynchronous copies of scales, which need 4
# bytes of them per thread: n * k of 8192 with 4 warps.
_TILES: tuple[tuple[int, Tiles], ...] = (
    (16, Tiles(16, 32, 256, 4, 4)),
    (32, Tiles(32, 64, 128, 4, 4)),
    (64, Tiles(64, 64, 128, 4, 3)),
)
"""(max tokens, tiles) in ascending order."""
_LAST_TILES = Tiles(64, 128, 64, 4, 3)
_LAST_TILES_SM90 = Tiles(128, 128, 64, 4, 3)
"""For larger M; `wgmma` leaves room for more accumulators in registers than `mma`."""
_BATCH_INVARIANT_TILES = Tiles(64, 64, 128, 4, 3)
_FLOAT32_TILES = Tiles(32, 64, 64, 4, 3)
"""For any M: TF32x3 products leave registers for nothing larger."""


def choose_tiles(
    m: int, dtype: torch.dtype, compute_capability: int, batch_invariant: bool
) -> Tiles:
    """Tile sizes for m tokens of a dtype, on a GPU of a compute capability (90 for SM90)."""
    if dtype == torch.float32:
        return _FLOAT32_TILES
    if batch_invariant:
        return _BATCH_INVARIANT_TILES
    last = _LAST_TILES_SM90 if compute_capability == 90 else _LAST_TILES
    return next((tiles for most, tiles in _TILES if m <= most), last)


@triton.jit
def decode_weights(packed, scales, operand: tl.constexpr, ptx: tl.constexpr):
    """Decode bytes `[n, k/2]` and scale bytes `[n, k/16]` to `[n, k]` of dtype `operand`.

    Exact, times 2^-14 for bfloat16, else times 2^-7.
    """
    factors = e4m3_to_float16(scales)  # times 2^-8
    if operand == tl.bfloat16:
        # Made for power-of-two scales; bfloat16 also holds the six significant bits here exactly.
        even, odd = e8m0_fp4_to_bfloat16(packed, spread(factors.to(tl.bfloat16), _BLOCK // 2))
    else:
        even, odd = nvfp4_to_float16(packed, spread(factors * 32768.0, _BLOCK // 2), ptx)
        even, odd = even.to(operand), odd.to(operand)
    return tl.reshape(tl.join(even, odd), (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def place_in_grid(tiles_m, tiles_n, shared_weights: tl.constexpr):
    """The program's tile of rows and tile of columns in a 1-D grid of `tiles_m * tiles_n`.

    `shared_weights` tiles of rows run next to each other, so that they share weights in L2.
    """
    first = tl.program_id(0) // (shared_weights * tiles_n) * shared_weights
    place = tl.program_id(0) % (shared_weights * tiles_n)
    height = tl.minimum(tiles_m - first, shared_weights)
    return first + place % height, place // height


# m must not specialize the kernel: another variant could round differently.
@triton.jit(do_not_specialize=["m"])
def linear_kernel(
    x,
    weight,
    weight_scale,
    row_scale,
    bias,
    out,
    m,
    n,
    k,
    has_bias: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    alignment: tl.constexpr,
    shared_weights: tl.constexpr,
):
    """Computes a tile of the output; 1-D grid, constants from `kernel_constants`.

    Args:
        x: `[m, k]`, contiguous.
        weight, weight_scale: uint8 `[n, k/2]` and `[n, k/16]`, contiguous.
        row_scale: float32 `[n]`.
        bias: `[n]`, read where `has_bias`.
        out: `[m, n]`, contiguous, written.
    """
    row, column = place_in_grid(tl.cdiv(m, tile_m), tl.cdiv(n, tile_n), shared_weights)
    rows = row * tile_m + tl.arange(0, tile_m)
    columns = column * tile_n + tl.arange(0, tile_n)
    live_rows = (rows < m)[:, None]
    live_columns = (columns < n)[:, None]

    wide_rows, wide_columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[:, None]
    ks = tl.arange(0, tile_k)[None, :]
    pairs = tl.arange(0, tile_k // 2)[None, :]
    blocks = tl.arange(0, tile_k // _BLOCK)[None, :]
    x += wide_rows * k + ks
    weight += wide_columns * tl.multiple_of(k // 2, alignment * (_BLOCK // 2)) + pairs
    weight_scale += wide_columns * tl.multiple_of(k // _BLOCK, alignment) + blocks

    acc = tl.zeros((tile_m, tile_n), tl.float32)
    for start in tl.range(0, k, tile_k):
        x_mask, w_mask, s_mask = live_rows, live_columns, live_columns
        if alignment * _BLOCK < tile_k:  # the last tile is partial
            left = tl.multiple_of((k - start) // _BLOCK, alignment)
            x_mask = x_mask & (ks < left * _BLOCK)
            w_mask = w_mask & (pairs < left * (_BLOCK // 2))
            s_mask = s_mask & (blocks < left)
        packed = tl.load(weight + start // 2, mask=w_mask, other=0)
        scales = tl.load(weight_scale + start // _BLOCK, mask=s_mask, other=0)
        values = tl.load(x + start, mask=x_mask, other=0.0).to(operand)
        decoded = decode_weights(packed, scales, operand, ptx)
        # float32 operands: TF32x3, as accurate as float32 sums.
        acc = tl.dot(values, tl.trans(decoded), acc, input_precision="tf32x3")

    live = columns < n
    acc *= 16384.0 if operand == tl.bfloat16 else 128.0  # the power of two of `decode_weights`
    acc *= tl.load(row_scale + columns, mask=live, other=0.0)[None, :]
    if has_bias:
        acc += tl.load(bias + columns, mask=live, other=0.0).to(tl.float32)[None, :]
    out += wide_rows * n + columns[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=live_rows & live[None, :])


def kernel_constants(
    dtype: torch.dtype, k: int, has_bias: bool, tiles: Tiles, interpreted: bool = False
) -> dict[str, Any]:
    """The constexpr arguments of `linear_kernel`.

    Args:
        dtype: of x.
        k: K; only the largest power of two that divides it matters.
        has_bias: whether a bias is added.
        tiles: tile sizes.
        interpreted: for Triton's interpreter, which has no inline assembly and no true bfloat16
            matmul.
    """
    if interpreted and dtype == torch.bfloat16:
        dtype = torch.float32
    return {
        "has_bias": has_bias,
        "operand": _OPERANDS[dtype],
        "ptx": not interpreted,
        "tile_m": tiles.m,
        "tile_n": tiles.n,
        "tile_k": tiles.k,
        "alignment": gcd(k, tiles.k) // _BLOCK.value,
        "shared_weights": _SHARED_WEIGHTS,
    }


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """x times NVFP4 weights, transposed: `x @ dequantize(weight)^T + bias`.

    Never syncs the GPU. The first call for a dtype and a tile size compiles.

    Args:
        x: bfloat16, float16 or float32 `[M, K]`, contiguous, K a multiple of 16; fastest where
            aligned to 16 bytes.
        weight: uint8 `[N, K/2]`, low nibble = even k, contiguous.
        weight_scale: float8_e4m3fn or uint8 `[N, K/16]`, contiguous.
        row_scale: float32 `[N]`, the global scale of each row's part.
        bias: `[N]` of x's dtype, contiguous, or None.
        batch_invariant: whether a token's bits must not depend on the other tokens.
        tiles: tile sizes; by default from `choose_tiles`.

    Returns:
        `[M, N]` of x's dtype.

    Raises:
        ValueError: shapes that do not belong together, or x of another dtype.
    """
    (m, k), n = x.shape, weight.shape[0]
    shapes = [tuple(tensor.shape) for tensor in (weight, weight_scale, row_scale)]
    if x.dtype not in _OPERANDS or k % 16 or shapes != [(n, k // 2), (n, k // 16), (n,)]:
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)}, weight {shapes[0]}, weight_scale {shapes[1]} and "
            f"row_scale {shapes[2]} do not belong together"
        )
    interpreted = not x.is_cuda
    tiles = tiles or choose_tiles(m, x.dtype, _compute_capability_of(x.device), batch_invariant)
    # The interpreter cannot round to bfloat16 either.
    narrow = interpreted and x.dtype == torch.bfloat16
    out = x.new_empty((m, n), dtype=torch.float32 if narrow else x.dtype)
    if m == 0:
        return out.to(x.dtype)
    with current_device(x.get_device()):
        linear_kernel[(triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n),)](
            x=x,
            weight=weight,
            weight_scale=weight_scale.view(torch.uint8),
            row_scale=row_scale,
            bias=row_scale if bias is None else bias,
            out=out,
            m=m,
            n=n,
            k=k,
            **kernel_constants(x.dtype, k, bias is not None, tiles, interpreted),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out.to(x.dtype)


_compute_capability_of = lru_cache(maxsize=8)(compute_capability_of)
