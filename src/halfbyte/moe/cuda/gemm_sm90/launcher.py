"""Launches the kernels of a MoE layer for many tokens on SM90: sort with a copy of the tokens,
gate_up with activation, down, sum. For tiles of 16 tokens see `narrow`."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.moe.cuda.gemm_sm90 import narrow
from halfbyte.moe.cuda.gemm_sm90.plan import (
    MAX_NARROW_PAIRS,
    NARROW,
    SORT_THREADS,
    STEP_K,
    TOKENS,
    MoeGemmPlan,
    choose_tokens,
    make_plan,
    max_rows,
    max_tiles,
)
from halfbyte.moe.cuda.gemm_sm90.products import (
    THREADS,
    Tiles,
    kernel_of,
    map_of,
    out_map,
    padded,
    product_kernel,
    product_of,
)
from halfbyte.moe.cuda.launcher import work_of
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.cuda.pairs import Pairs, pairs_of
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.sums import compile_sum, sum_results
from halfbyte.moe.experts import GatedActivation


class _SortParams(ctypes.Structure):
    """`Params` of `sort.cu`."""

    _fields_ = (
        ("pairs", Pairs),
        *((name, ctypes.c_void_p) for name in ("x", "sorted", "places", "tiles", "num_tiles")),
        *((name, ctypes.c_int) for name in ("h", "chunks", "tokens")),
        ("fraction", ctypes.c_uint32),
    )


class _Sorted(NamedTuple):
    """Results of the sort kernel."""

    x: torch.Tensor
    """`[rows, H padded to 128]`."""
    places: torch.Tensor
    """int32 `[2 pairs]`: row of a pair or -1, and the bits of its weight."""
    tiles: Tiles


def run(
    hidden: torch.Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tokens: int | None = None,
) -> torch.Tensor:
    """`moe_experts` on SM90 for many tokens, see `gemm.cu`; arguments as of
    `halfbyte.moe.cuda.launcher.run`.

    Never syncs the GPU; launches and sizes depend on shapes alone, so that a call can be captured
    in a CUDA graph, after `compile_gemm` or a first call. A token's bits do not depend on the
    other tokens.

    Args:
        tokens: of a tile, one of `TOKENS`; by default from `choose_tokens`.

    Raises:
        ValueError: tiles of 16 tokens for more than `MAX_NARROW_PAIRS` pairs.
    """
    device, num_pairs = hidden.get_device(), topk_ids.numel()
    if num_pairs == 0:
        return torch.empty_like(hidden)
    gpu = gpu_of(device)
    works = work_of(gate_up, activation), work_of(down, None)
    tokens = tokens or choose_tokens(works, num_pairs, gpu.block_bytes, gpu.num_sms)
    pairs = pairs_of(topk_ids, topk_weights, works[0].num_experts)
    if tokens == NARROW:
        if num_pairs > MAX_NARROW_PAIRS:
            raise ValueError(
                f"tiles of {NARROW} tokens: {num_pairs} pairs, at most {MAX_NARROW_PAIRS}"
            )
        return narrow.run(hidden, pairs, gate_up, down, activation, works)
    found = _sort(hidden, pairs, tokens, device)
    middle = allocate(
        contiguous_memory((found.x.shape[0], padded(works[1].k)), hidden.dtype), device
    )
    # Down's results take the place of the tokens, which are no longer needed.
    results = found.x
    _multiply(found.x, gate_up, activation, works[0], found.tiles, tokens, middle)
    _multiply(middle, down, None, works[1], found.tiles, tokens, results)
    return sum_results(results, pairs, hidden.shape[1], found.places)


def _sort(hidden: torch.Tensor, pairs: Pairs, tokens: int, device: int) -> _Sorted:
    h, num_experts = hidden.shape[1], pairs.num_experts
    tiles = max_tiles(pairs.count, num_experts, tokens)
    x = contiguous_memory((max_rows(pairs.count, num_experts), padded(h)), hidden.dtype)
    sizes = (2 * tiles, 2 * pairs.count, 1)
    lists = allocate(contiguous_memory((sum(sizes),), torch.int32), device)
    of_tiles, places, num_tiles = lists.split(sizes)
    found = _Sorted(allocate(x, device), places, Tiles(of_tiles, num_tiles, tiles))
    fraction = -(-(2**32) // tokens)
    arguments = KernelArguments(
        _SortParams, h=h, chunks=padded(h) // STEP_K, tokens=tokens, fraction=fraction
    )
    arguments.params.pairs = pairs
    arguments.bind(x=hidden, sorted=found.x, places=places, tiles=of_tiles, num_tiles=num_tiles)
    grid = min(2 * gpu_of(device).num_sms, -(-pairs.count // (SORT_THREADS // 32)))
    shared_bytes = 8 * num_experts + 4 * -(-pairs.count // grid)
    kernel = _sort_kernel(device)._replace(shared_bytes=shared_bytes)
    nvrtc.launch(kernel, grid, SORT_THREADS, (arguments.params,), overlap=True)
    return found


def _multiply(
    x: torch.Tensor,
    matrices: PackedMatrix,
    activation: GatedActivation | None,
    work: Work,
    tiles: Tiles,
    tokens: int,
    out: torch.Tensor,
) -> None:
    """Write the first product, or without activation the second, to `out` `[rows, columns]`."""
    device = x.get_device()
    arguments = product_of(matrices, activation, work, tiles)
    kernel, plan = kernel_of(work, tokens, x.dtype, device)
    maps = (
        map_of(x.data_ptr(), *x.shape, x.shape[1], x.dtype, tokens // 2, 64, device),
        out_map(out, work, device),
    )
    units = tiles.max_tiles * arguments.params.row_pairs
    clusters = min(plan.ctas * gpu_of(device).num_sms // 2, units)
    nvrtc.launch(
        *(kernel, 2 * clusters, THREADS, (*maps, arguments.params)),
        overlap=True,
        ctas_per_sm=plan.ctas,
    )


def compile_gemm(
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    dtype: torch.dtype,
    device: int,
) -> None:
    """Compile every kernel that a layer may need, so that graph capture compiles nothing."""
    block_bytes = gpu_of(device).block_bytes
    works = work_of(gate_up, activation), work_of(down, None)
    plans = [
        (work, make_plan(work, tokens, block_bytes))
        for tokens in TOKENS
        for work in (works[:1] if tokens == NARROW else works)
    ]

    def compile_one(item: tuple[Work, MoeGemmPlan]) -> None:
        work, plan = item
        product_kernel(dtype, plan, work, device)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, plans))
    _sort_kernel(device)
    narrow.compile_list(device)
    compile_sum(dtype, is_sorted=True, device=device)


def _sort_kernel(device: int) -> nvrtc.Kernel:
    return nvrtc.load("moe/cuda/gemm_sm90/sort.cu", (), (("moe_sort", 0),), device)["moe_sort"]
