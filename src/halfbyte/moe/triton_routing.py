"""Sorting tokens by expert on the GPU, without a sync: all sizes depend on shapes alone.

A *pair* is a token and one of its experts, numbered `token * top_k + j`. Sorted pairs of an expert
are adjacent and in ascending order, so the sort is the same in every run. They are cut in tiles of
`tile_m`; a tile belongs to one expert. Tiles that a batch does not need have expert -1."""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_MIN_BINS = 32
"""`tl.histogram` needs a bin per thread of a warp; some versions of Triton do not pad to it."""
_SMALL_CHUNK, _CHUNK = 512, 2048
"""Pairs that a program reads at once: all of a small batch, or part of a large one."""


class Routing(NamedTuple):
    """Sorted pairs and their tiles."""

    pairs: torch.Tensor
    """int32 `[M * top_k]`: pairs by expert. Pairs without an expert are absent at the end, where
    nothing is written."""
    tiles: torch.Tensor
    """int32 `[3, max_tiles]`: expert (or -1), begin and end in `pairs` of each tile."""


def max_tiles(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """Max tiles of any routing: every expert that is hit may have one partial tile."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // tile_m


# num_pairs must not specialize the kernel: it changes from step to step.
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    topk_ids,
    pairs,
    tiles,
    num_pairs,
    num_tiles,
    num_experts: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
    tile_m: tl.constexpr,
):
    """Finds the pairs of one expert; one program per expert.

    Args:
        topk_ids: int32 or int64 `[num_pairs]`.
        pairs: int32 `[num_pairs]`, written.
        tiles: int32 `[3, num_tiles]`, written.
        bins: a power of two above `num_experts`.
    """
    expert = tl.program_id(0)
    offsets = tl.arange(0, chunk)
    counts = tl.zeros((bins,), tl.int32)
    for first in tl.range(0, num_pairs, chunk):
        live = first + offsets < num_pairs
        ids = tl.load(topk_ids + first + offsets, mask=live, other=-1)
        ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
        counts += tl.histogram(ids, bins)
    bin_ids = tl.arange(0, bins)
    counts = tl.where(bin_ids < num_experts, counts, 0)
    tile_counts = (counts + tile_m - 1) // tile_m
    count = tl.sum(tl.where(bin_ids == expert, counts, 0))
    start = tl.sum(tl.where(bin_ids < expert, counts, 0))
    first_tile = tl.sum(tl.where(bin_ids < expert, tile_counts, 0))

    place = start
    for first in tl.range(0, num_pairs, chunk):
        live = first + offsets < num_pairs
        ids = tl.load(topk_ids + first + offsets, mask=live, other=-1)
        own = (ids == expert).to(tl.int32)
        rank = tl.cumsum(own, 0) - 1
        tl.store(pairs + place + rank, first + offsets, mask=own != 0)
        place += tl.sum(own)

    for first in tl.range(0, tl.cdiv(count, tile_m), chunk):
        tile = first + offsets
        live = tile * tile_m < count
        entry = tiles + first_tile + tile
        tl.store(entry, tl.zeros((chunk,), tl.int32) + expert, mask=live)
        begin = start + tile * tile_m
        tl.store(entry + num_tiles, begin, mask=live)
        tl.store(entry + 2 * num_tiles, tl.minimum(begin + tile_m, start + count), mask=live)
    if expert == num_experts - 1:
        for first in tl.range(tl.sum(tile_counts), num_tiles, chunk):
            tile = first + offsets
            tl.store(tiles + tile, tl.full((chunk,), -1, tl.int32), mask=tile < num_tiles)


# top_k is small, and fixed for a model.
@triton.jit(do_not_specialize=["num_experts"])
def sum_kernel(results, topk_ids, out, n, num_experts, top_k: tl.constexpr, tile: tl.constexpr):
    """Adds up a token's results in the order of j; grid `[M, cdiv(n, tile)]`.

    Args:
        results: `[M * top_k, n]`, by pairs; not written for pairs without an expert.
        topk_ids: `[M * top_k]`.
        out: `[M, n]`, written.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    total = tl.zeros((tile,), tl.float32)
    for j in tl.static_range(top_k):
        pair = token * top_k + j
        expert = tl.load(topk_ids + pair)
        live = (columns < n) & (expert >= 0) & (expert < num_experts)
        total += tl.load(results + pair * n + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * n + columns, total.to(out.dtype.element_ty), mask=columns < n)


def sort_pairs(topk_ids: torch.Tensor, num_experts: int, tile_m: int) -> Routing:
    """Sort pairs by expert.

    Args:
        topk_ids: int32 or int64 `[M, top_k]`, contiguous, M >= 1. Ids outside
            `0 .. num_experts - 1` are left out.
        num_experts: E.
        tile_m: pairs per tile.
    """
    num_pairs = topk_ids.numel()
    num_tiles = max_tiles(num_pairs, num_experts, tile_m)
    pairs = topk_ids.new_empty((num_pairs,), dtype=torch.int32)
    tiles = topk_ids.new_empty((3, num_tiles), dtype=torch.int32)
    sort_kernel[(num_experts,)](
        topk_ids,
        pairs,
        tiles,
        num_pairs,
        num_tiles,
        num_experts=num_experts,
        bins=max(_MIN_BINS, triton.next_power_of_2(num_experts + 1)),
        chunk=_SMALL_CHUNK if num_pairs <= _SMALL_CHUNK else _CHUNK,
        tile_m=tile_m,
        num_warps=4,
    )
    return Routing(pairs, tiles)


def sum_results(
    results: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, dtype: torch.dtype
) -> torch.Tensor:
    """`[M, H]` of a dtype: each token's results, already weighted, in the order of j.

    Args:
        results: `[M * top_k, H]`, by pairs; those of ids without an expert are not read.
        topk_ids: `[M, top_k]`, contiguous, M >= 1.
        num_experts: E.
        dtype: of the result.
    """
    (m, top_k), n = topk_ids.shape, results.shape[1]
    out = results.new_empty((m, n), dtype=dtype)
    tile = min(1024, triton.next_power_of_2(n))
    sum_kernel[(m, triton.cdiv(n, tile))](
        results, topk_ids, out, n, num_experts, top_k=top_k, tile=tile, num_warps=4
    )
    return out
