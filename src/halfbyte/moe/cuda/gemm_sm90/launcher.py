"""Launches the kernels of a MoE layer for many tokens on SM90: sort with a copy of the tokens,
gate_up with activation and down (tiles of 16 tokens: both in one kernel), sum."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory, current_device
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.kernels.runtime.tensor_maps import TensorMap, tensor_map, tensor_map_of_boxes
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.moe.cuda.gemm_sm90.plan import (
    NARROW,
    SORT_THREADS,
    STEP_K,
    STRIP,
    TOKENS,
    MoeGemmPlan,
    choose_tokens,
    make_plan,
    max_rows,
    max_tiles,
    row_pairs,
    steps,
)
from halfbyte.moe.cuda.launcher import product_arguments, work_of
from halfbyte.moe.cuda.packed import PackedMatrix, tile_bytes
from halfbyte.moe.cuda.pairs import Pairs, pairs_of
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.sums import compile_sum, sum_results
from halfbyte.moe.experts import GatedActivation

_THREADS = 384


class _SortParams(ctypes.Structure):
    """`Params` of `sort.cu`."""

    _fields_ = (
        ("pairs", Pairs),
        *((name, ctypes.c_void_p) for name in ("x", "sorted", "places", "tiles", "num_tiles")),
        *((name, ctypes.c_void_p) for name in ("written", "counters")),
        *((name, ctypes.c_int) for name in ("h", "chunks", "tokens")),
        ("fraction", ctypes.c_uint32),
    )


class _Params(ctypes.Structure):
    """`Params` of `work.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "global_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("tiles", "num_tiles")),
        *((name, ctypes.c_int) for name in ("parts", "bias_dtype", "n", "steps")),
        *((name, ctypes.c_int) for name in ("matrix_tiles", "tile_bytes")),
        *((name, ctypes.c_int) for name in ("row_pairs", "max_tiles")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_offset")),
    )


class _Products(ctypes.Structure):
    """`Products` of `narrow_work.cuh`."""

    _fields_ = (
        *((name, _Params) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("written", "counters")),
    )


class _Sorted(NamedTuple):
    """Results of the sort kernel; `[rows, H padded to 128]` and lists."""

    x: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    written: torch.Tensor
    counters: torch.Tensor
    max_tiles: int


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
    """
    device, num_pairs = hidden.get_device(), topk_ids.numel()
    if num_pairs == 0:
        return torch.empty_like(hidden)
    gpu = gpu_of(device)
    works = work_of(gate_up, activation), work_of(down, None)
    tokens = tokens or choose_tokens(works, num_pairs, gpu.block_bytes, gpu.num_sms)
    pairs = pairs_of(topk_ids, topk_weights, works[0].num_experts)
    found = _sort(hidden, pairs, tokens, device)
    middle = allocate(
        contiguous_memory((found.x.shape[0], _padded(works[1].k)), hidden.dtype), device
    )
    # Down's results take the place of the tokens, which are no longer needed.
    results = found.x
    if tokens == NARROW:
        _multiply_narrow(found, gate_up, down, activation, works, middle)
    else:
        _multiply(found.x, gate_up, activation, works[0], found, tokens, middle)
        _multiply(middle, down, None, works[1], found, tokens, results)
    return sum_results(results, pairs, hidden.shape[1], found.places)


def _sort(hidden: torch.Tensor, pairs: Pairs, tokens: int, device: int) -> _Sorted:
    h, num_experts = hidden.shape[1], pairs.num_experts
    tiles = max_tiles(pairs.count, num_experts, tokens)
    x = contiguous_memory((max_rows(pairs.count, num_experts), _padded(h)), hidden.dtype)
    lists = allocate(contiguous_memory((4 * tiles + 2 * pairs.count + 3,), torch.int32), device)
    found = _Sorted(
        allocate(x, device),
        lists[4 * tiles : -3],
        lists[2 * tiles : 4 * tiles],
        lists[-1:],
        lists[: 2 * tiles],
        lists[-3:-1],
        tiles,
    )
    fraction = -(-(2**32) // tokens)
    sizes = {"h": h, "chunks": _padded(h) // STEP_K, "tokens": tokens, "fraction": fraction}
    arguments = KernelArguments(_SortParams, **sizes)
    arguments.params.pairs = pairs
    arguments.bind(
        x=hidden,
        sorted=found.x,
        places=found.places,
        tiles=found.tiles,
        num_tiles=found.num_tiles,
        written=found.written,
        counters=found.counters,
    )
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
    found: _Sorted,
    tokens: int,
    out: torch.Tensor,
) -> None:
    """Write the first product, or without activation the second, to `out` `[rows, columns]`."""
    device = x.get_device()
    arguments = _product(matrices, activation, work, found)
    kernel, plan = _kernel_of(work, tokens, x.dtype, device)
    maps = (
        _map(x.data_ptr(), *x.shape, x.shape[1], x.dtype, tokens // 2, 64, device),
        _out_map(out, work, device),
    )
    clusters = min(
        plan.ctas * gpu_of(device).num_sms // 2, found.max_tiles * arguments.params.row_pairs
    )
    nvrtc.launch(
        *(kernel, 2 * clusters, _THREADS, (*maps, arguments.params)),
        overlap=True,
        ctas_per_sm=plan.ctas,
    )


def _multiply_narrow(
    found: _Sorted,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    works: tuple[Work, Work],
    middle: torch.Tensor,
) -> None:
    """Both products, for tiles of `NARROW` tokens; the second takes the place of `found.x`."""
    x, device = found.x, found.x.get_device()
    products = [
        _product(matrices, of, work, found)
        for matrices, of, work in zip((gate_up, down), (activation, None), works, strict=True)
    ]
    params = [product.params for product in products]
    arguments = KernelArguments(_Products)
    arguments.params.gate_up, arguments.params.down = params
    arguments.bind(written=found.written, counters=found.counters)
    maps = (
        _narrow_map(x.data_ptr(), *x.shape, x.dtype, device),
        _out_map(middle, works[0], device),
        _narrow_map(middle.data_ptr(), *middle.shape, middle.dtype, device),
        _out_map(x, works[1], device),
    )
    kernel, plan = _kernel_of(works[0], NARROW, x.dtype, device)
    grid = min(
        plan.ctas * gpu_of(device).num_sms,
        found.max_tiles * max(product.row_pairs for product in params),
    )
    nvrtc.launch(
        *(kernel, grid, _THREADS, (*maps, arguments.params)), overlap=True, ctas_per_sm=plan.ctas
    )


def _product(
    matrices: PackedMatrix, activation: GatedActivation | None, work: Work, found: _Sorted
) -> KernelArguments:
    sizes = {
        "n": work.n,
        "steps": steps(work),
        "matrix_tiles": work.tiles,
        "tile_bytes": tile_bytes(work.k, work.weight_format),
        "row_pairs": row_pairs(work),
        "max_tiles": found.max_tiles,
    }
    arguments = product_arguments(_Params, matrices, activation, **sizes)
    arguments.bind(weight=matrices.packed, tiles=found.tiles, num_tiles=found.num_tiles)
    return arguments


@lru_cache(maxsize=4096)
def _kernel_of(
    work: Work, tokens: int, dtype: torch.dtype, device: int
) -> tuple[nvrtc.Kernel, MoeGemmPlan]:
    plan = make_plan(work, tokens, gpu_of(device).block_bytes)
    kernel = _gemm_kernel(dtype, plan, work, device)
    return kernel, plan


def _padded(k: int) -> int:
    return -(-k // STEP_K) * STEP_K


@lru_cache(maxsize=4096)
def _map(
    address: int,
    rows: int,
    columns: int,
    stride: int,
    dtype: torch.dtype,
    box_rows: int,
    box_columns: int,
    device: int,
) -> TensorMap:
    with current_device(device):
        return tensor_map(address, rows, columns, stride, dtype, box_rows, box_columns)


def _out_map(out: torch.Tensor, work: Work, device: int) -> TensorMap:
    """Of a product's results: one copy stores a strip of a warpgroup."""
    columns = out.shape[1] if work.gated else work.n
    box = STRIP, 32 if work.gated else 64
    return _map(out.data_ptr(), out.shape[0], columns, out.shape[1], out.dtype, *box, device)


@lru_cache(maxsize=4096)
def _narrow_map(
    address: int, rows: int, columns: int, dtype: torch.dtype, device: int
) -> TensorMap:
    """Of x for `narrow.cu`: one copy loads 8 rows x 128 k."""
    with current_device(device):
        return tensor_map_of_boxes(address, rows, columns, columns, dtype, 8, 2)


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
        _gemm_kernel(dtype, plan, work, device)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, plans))
    _sort_kernel(device)
    compile_sum(dtype, is_sorted=True, device=device)


@lru_cache(maxsize=4096)
def _gemm_kernel(dtype: torch.dtype, plan: MoeGemmPlan, work: Work, device: int) -> nvrtc.Kernel:
    macros = (*dtype_macros(dtype), *plan.macros(work))
    functions = (("moe_gemm", plan.shared_bytes(work)),)
    source = "narrow.cu" if plan.tokens == NARROW else "gemm.cu"
    return nvrtc.load(f"moe/cuda/gemm_sm90/{source}", macros, functions, device)["moe_gemm"]


def _sort_kernel(device: int) -> nvrtc.Kernel:
    return nvrtc.load("moe/cuda/gemm_sm90/sort.cu", (), (("moe_sort", 0),), device)["moe_sort"]
