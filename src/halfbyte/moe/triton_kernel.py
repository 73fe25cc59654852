"""Grouped products with 4-bit weights in Triton: each tile of tokens has one expert's matrix.

Of `linear/w4a16/triton_kernel.py` this is the general case: a dense layer is one expert that all
tokens have. A program computes a tile of the output in one loop over k, with the expert of its tile
of sorted pairs (`triton_routing.py`). The first product gathers tokens, computes gate and up in
two accumulators and applies the activation; the second multiplies its rows by the router's weights
and scatters them to the pairs' places, so that a third kernel can add them in a fixed order.

No split-K, and no atomics: every launch gives the same bits. The batch-invariant mode has one tile
size for any M."""

# mypy: disable-error-code="no-untyped-def"

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.formats.decode import (
    e2m1_to_float32,
    e8m0_fp4_to_bfloat16,
    e8m0_to_float32,
    spread,
)
from halfbyte.linear.w4a16.triton_kernel import Tiles, decode_weights, place_in_grid
from halfbyte.moe.experts import BLOCK_SIZES, GatedActivation, WeightFormat
from halfbyte.moe.triton_packed import load_packed, packed_places, packed_tile_bytes

_SHARED_WEIGHTS = 8
"""Tiles of tokens that run next to each other, so that they share weights in L2."""
_OPERANDS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class ProductTiles(NamedTuple):
    """Tiles of the two products, of the same `m`; those of gate_up have `n` rows of each of gate
    and up."""

    gate_up: Tiles
    down: Tiles


# Chosen by compiling for SM80, SM90, SM100 and SM120, not yet by timing: no spilled registers, and
# where that allows it asynchronous copies of scales, which need 4 bytes of them per thread: n * k
# of 8192 with 4 warps.
_TILES_16 = ProductTiles(Tiles(16, 32, 256, 4, 3), Tiles(16, 32, 256, 4, 4))
_TILES_32 = ProductTiles(Tiles(32, 64, 128, 4, 3), Tiles(32, 64, 128, 4, 4))
_TILES_64 = ProductTiles(Tiles(64, 32, 128, 4, 3), Tiles(64, 64, 128, 4, 3))
_TILES_64_SM90 = ProductTiles(Tiles(64, 64, 128, 4, 3), Tiles(64, 64, 128, 4, 3))
"""Also SM100: accumulators of `wgmma` and `tcgen05` leave room in registers for more weights."""
_LAST_TILES = ProductTiles(Tiles(64, 32, 128, 4, 3), Tiles(64, 128, 64, 4, 3))
_LAST_TILES_SM90 = ProductTiles(Tiles(128, 64, 64, 4, 3), Tiles(128, 128, 64, 4, 3))
_FLOAT32_TILES = ProductTiles(Tiles(32, 32, 64, 8, 3), Tiles(32, 64, 64, 8, 3))
_MAX_MEAN_16, _MAX_MEAN_32, _MAX_MEAN_64 = 12, 24, 96
"""Max mean tokens per expert for tiles of 16, 32 and 64 tokens. The first two are less than the
tile, because some experts get more than the mean."""


def choose_tiles(
    num_pairs: int,
    num_experts: int,
    dtype: torch.dtype,
    compute_capability: int,
    batch_invariant: bool,
) -> ProductTiles:
    """Tile sizes for a number of pairs, on a GPU of a compute capability (90 for SM90)."""
    if dtype == torch.float32:
        return _FLOAT32_TILES
    tiles_64 = _TILES_64_SM90 if compute_capability // 10 in (9, 10) else _TILES_64
    if batch_invariant:
        return tiles_64
    mean = num_pairs / num_experts
    if mean <= _MAX_MEAN_16:
        return _TILES_16
    if mean <= _MAX_MEAN_32:
        return _TILES_32
    if mean <= _MAX_MEAN_64:
        return tiles_64
    return _LAST_TILES_SM90 if compute_capability == 90 else _LAST_TILES


@triton.jit
def _decode(packed, scales, mx: tl.constexpr, operand: tl.constexpr, ptx: tl.constexpr):
    """Decode bytes `[n, k/2]` and scale bytes to `[n, k]` of dtype `operand`, exact but for powers
    of two: see `kernel_constants`."""
    if mx:
        factors = e8m0_to_float32(scales)
        if operand == tl.bfloat16:
            even, odd = e8m0_fp4_to_bfloat16(packed, spread(factors.to(tl.bfloat16), 16))
        else:
            factors = spread(factors, 16)
            even = e2m1_to_float32(packed & 0xF) * factors
            odd = e2m1_to_float32(packed >> 4) * factors
        decoded = tl.reshape(tl.join(even, odd), (packed.shape[0], 2 * packed.shape[1]))
    else:
        decoded = decode_weights(packed, scales, operand, ptx)
    return decoded


# No size that changes from step to step may specialize the kernel: another variant could round
# differently.
@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(
    x,
    weight,
    scales,
    global_scale,
    bias,
    out,
    pairs,
    tiles,
    pair_weights,
    num_tiles,
    n,
    k,
    top_k,
    gated: tl.constexpr,
    interleaved: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    up_offset: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    unscale: tl.constexpr,
    has_bias: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    alignment: tl.constexpr,
    shared_weights: tl.constexpr,
    is_packed: tl.constexpr,
    for_float16: tl.constexpr,
):
    """Computes a tile of the output; 1-D grid, constants from `kernel_constants`.

    Args:
        x: `[M, k]` if gated, rows by token; else `[pairs, k]`, rows by sorted pair.
        weight, scales: uint8 `[E, N, k/2]` and `[E, N, k/block]`; N is 2 * n if gated, else n.
            Where `is_packed`, weight is in the order of `cuda/packed.py`, and scales are not read.
        global_scale: float32 `[E, parts]`, read where `parts`.
        bias: `[E, N]`, read where `has_bias`.
        out: `[pairs, n]`, rows by sorted pair if gated, else by pair; written.
        pairs, tiles: of `triton_routing.Routing`.
        pair_weights: `[pairs]`, read where not gated.
    """
    tile, column = place_in_grid(num_tiles, tl.cdiv(n, tile_n), shared_weights)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    begin = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    positions = begin + tl.arange(0, tile_m)
    live_rows = positions < end
    columns = column * tile_n + tl.arange(0, tile_n)
    live_columns = columns < n
    own_pairs = tl.load(pairs + positions, mask=live_rows, other=0)
    rows = own_pairs // top_k if gated else positions

    ks = tl.arange(0, tile_k)[None, :]
    bytes_ = tl.arange(0, tile_k // 2)[None, :]
    blocks = tl.arange(0, tile_k // block)[None, :]
    x += rows.to(tl.int64)[:, None] * k + ks
    # Row numbers in the matrices of all experts: of gate, or of the only product, and of up.
    if gated:
        matrix = expert * (2 * n)
        row = matrix + (2 * columns if interleaved else columns)
        row_up = row + (1 if interleaved else n)
    else:
        row = expert * n + columns
        row_up = row
    if is_packed:
        place, g, is_lower, places = packed_places(columns, n, gated)
        own = weight + (expert * places + place) * packed_tile_bytes(k, block)
    else:
        row_bytes = tl.multiple_of(k // 2, alignment * (block // 2))
        row_blocks = tl.multiple_of(k // block, alignment)
        packed_ptr = weight + row[:, None] * row_bytes + bytes_
        scale_ptr = scales + row[:, None] * row_blocks + blocks
        up_ptr = weight + row_up[:, None] * row_bytes + bytes_
        up_scale_ptr = scales + row_up[:, None] * row_blocks + blocks

    acc = tl.zeros((tile_m, tile_n), tl.float32)
    acc_up = tl.zeros((tile_m, tile_n), tl.float32)
    for start in tl.range(0, k, tile_k):
        x_mask = live_rows[:, None]
        w_mask, s_mask = live_columns[:, None], live_columns[:, None]
        if alignment * block < tile_k:  # the last tile is partial
            left = tl.multiple_of((k - start) // block, alignment)
            x_mask = x_mask & (ks < left * block)
            w_mask = w_mask & (bytes_ < left * (block // 2))
            s_mask = s_mask & (blocks < left)
        if is_packed:
            packed, factors = load_packed(
                tile=own,
                g=g,
                is_lower=is_lower,
                live=live_columns,
                start=start,
                k=k,
                float16=for_float16,
                block=block,
                size=tile_k,
            )
        else:
            packed = tl.load(packed_ptr + start // 2, mask=w_mask, other=0)
            factors = tl.load(scale_ptr + start // block, mask=s_mask, other=0)
        values = tl.load(x + start, mask=x_mask, other=0.0).to(operand)
        decoded = _decode(packed, factors, block == 32, operand, ptx)
        # float32 operands: TF32x3, as accurate as float32 sums.
        acc = tl.dot(values, tl.trans(decoded), acc, input_precision="tf32x3")
        if gated:
            if is_packed:
                packed, factors = load_packed(
                    tile=own,
                    g=g,
                    is_lower=is_lower + 1,
                    live=live_columns,
                    start=start,
                    k=k,
                    float16=for_float16,
                    block=block,
                    size=tile_k,
                )
            else:
                packed = tl.load(up_ptr + start // 2, mask=w_mask, other=0)
                factors = tl.load(up_scale_ptr + start // block, mask=s_mask, other=0)
            decoded = _decode(packed, factors, block == 32, operand, ptx)
            acc_up = tl.dot(values, tl.trans(decoded), acc_up, input_precision="tf32x3")

    acc *= unscale
    acc_up *= unscale
    if parts > 0:
        acc *= tl.load(global_scale + expert * parts)
        acc_up *= tl.load(global_scale + expert * parts + (parts - 1))
    if has_bias:
        acc += tl.load(bias + row, mask=live_columns, other=0.0).to(tl.float32)[None, :]
        if gated:
            up_bias = tl.load(bias + row_up, mask=live_columns, other=0.0).to(tl.float32)
            acc_up += up_bias[None, :]
    if gated:
        if limit > 0:  # comparisons that keep NaN
            acc = tl.where(acc > limit, limit, acc)
            acc_up = tl.where(acc_up > limit, limit, acc_up)
            acc_up = tl.where(acc_up < -limit, -limit, acc_up)
        acc = acc / (1.0 + tl.exp(-alpha * acc)) * (acc_up + up_offset)
        places = positions
    else:
        weights = tl.load(pair_weights + own_pairs, mask=live_rows, other=0.0)
        acc *= weights.to(tl.float32)[:, None]
        places = own_pairs
    live = live_rows[:, None] & live_columns[None, :]
    out += places.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=live)


class ProductKey(NamedTuple):
    """What the constants of a product depend on.

    Args:
        activation: of a gated product; None for the second one.
        weight_format: of the weights.
        parts: global scales per expert, 0 for mxfp4.
        k: K; only the largest power of two that divides it matters.
        has_bias: whether a bias is added.
        packed_for: dtype of the activations for which weights are in the order of
            `cuda/packed.py`; None if they are as loaded.
    """

    activation: GatedActivation | None
    weight_format: WeightFormat
    parts: int
    k: int
    has_bias: bool
    packed_for: torch.dtype | None = None


def kernel_constants(
    dtype: torch.dtype, product: ProductKey, tiles: Tiles, interpreted: bool = False
) -> dict[str, Any]:
    """The constexpr arguments of `grouped_kernel`.

    Args:
        dtype: of x.
        product: which one.
        tiles: tile sizes of the product.
        interpreted: for Triton's interpreter, which has no inline assembly and no true bfloat16
            matmul.
    """
    if interpreted and dtype == torch.bfloat16:
        dtype = torch.float32
    activation, block = product.activation, BLOCK_SIZES[product.weight_format]
    is_bfloat16 = dtype == torch.bfloat16
    if product.weight_format == "mxfp4":
        unscale = 64.0 if is_bfloat16 else 1.0
    else:
        unscale = 16384.0 if is_bfloat16 else 128.0
    gated = activation or GatedActivation()
    return {
        "gated": activation is not None,
        "interleaved": gated.interleaved,
        "alpha": float(gated.alpha),
        "limit": float(gated.limit or 0.0),
        "up_offset": float(gated.up_offset),
        "parts": product.parts,
        "block": block,
        "unscale": unscale,
        "has_bias": product.has_bias,
        "operand": _OPERANDS[dtype],
        "ptx": not interpreted,
        "tile_m": tiles.m,
        "tile_n": tiles.n,
        "tile_k": tiles.k,
        "alignment": gcd(product.k, tiles.k) // block,
        "shared_weights": _SHARED_WEIGHTS,
        "is_packed": product.packed_for is not None,
        "for_float16": product.packed_for == torch.float16,
    }
