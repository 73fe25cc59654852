"""Launches the kernels of a MoE layer for tiles of 16 tokens on SM90: a list of the pairs, both
products, sum."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory, current_device
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.kernels.runtime.tensor_maps import TensorMap, tensor_map_of_boxes
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.moe.cuda.gemm_sm90.plan import LIST_PAIRS, LIST_THREADS, NARROW, max_tiles
from halfbyte.moe.cuda.gemm_sm90.products import (
    THREADS,
    Params,
    Tiles,
    kernel_of,
    out_map,
    padded,
    product_of,
)
from halfbyte.moe.cuda.packed import PackedMatrix
from halfbyte.moe.cuda.pairs import Pairs
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.sums import sum_results
from halfbyte.moe.experts import GatedActivation


class _ListParams(ctypes.Structure):
    """`Params` of `list.cu`."""

    _fields_ = (
        ("pairs", Pairs),
        *((name, ctypes.c_void_p) for name in ("places", "tokens", "tiles", "num_tiles")),
        *((name, ctypes.c_void_p) for name in ("written", "counters")),
    )


class _Products(ctypes.Structure):
    """`Products` of `narrow_work.cuh`."""

    _fields_ = (
        *((name, Params) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "tokens")),
        ("h", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("written", "counters")),
    )


class Listed(NamedTuple):
    """Results of the list kernel, all int32."""

    tiles: Tiles
    places: torch.Tensor
    """`[2 pairs]`: row of a pair or -1, and the bits of its weight."""
    tokens: torch.Tensor
    """`[16 tiles.max_tiles]`: token of a row's pair; not set where a row has none."""
    written: torch.Tensor
    counters: torch.Tensor
    """Zeros, for `narrow.cu`."""


def run(
    hidden: torch.Tensor,
    pairs: Pairs,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: GatedActivation,
    works: tuple[Work, Work],
) -> torch.Tensor:
    """`launcher.run` with tiles of 16 tokens, for up to `MAX_NARROW_PAIRS` pairs and at least one.

    Args:
        hidden, gate_up, down, activation: as of `launcher.run`.
        pairs, works: of these.
    """
    device, h = hidden.get_device(), hidden.shape[1]
    listed = list_pairs(pairs, device)
    middle, results = (
        allocate(contiguous_memory((len(listed.tokens), width), hidden.dtype), device)
        for width in (padded(works[1].k), h)
    )
    params = [
        product_of(matrices, of, work, listed.tiles).params
        for matrices, of, work in zip((gate_up, down), (activation, None), works, strict=True)
    ]
    arguments = KernelArguments(_Products, h=h)
    arguments.params.gate_up, arguments.params.down = params
    arguments.bind(x=hidden, tokens=listed.tokens, written=listed.written, counters=listed.counters)
    maps = (
        out_map(middle, works[0], device),
        _map_of_x(middle.data_ptr(), *middle.shape, middle.dtype, device),
        out_map(results, works[1], device),
    )
    kernel, plan = kernel_of(works[0], NARROW, hidden.dtype, device)
    units = listed.tiles.max_tiles * max(product.row_pairs for product in params)
    grid = min(plan.ctas * gpu_of(device).num_sms, units)
    nvrtc.launch(
        *(kernel, grid, THREADS, (*maps, arguments.params)), overlap=True, ctas_per_sm=plan.ctas
    )
    return sum_results(results, pairs, h, listed.places)


def list_pairs(pairs: Pairs, device: int) -> Listed:
    """Launch `list.cu`.

    Args:
        pairs: of the batch, at least one.
        device: of their memory.
    """
    tiles = max_tiles(pairs.count, pairs.num_experts, NARROW)
    # Those of 64 bits first.
    sizes = (2 * tiles, 2 * tiles, 2 * pairs.count, NARROW * tiles, 2, 1)
    lists = allocate(contiguous_memory((sum(sizes),), torch.int32), device)
    written, of_tiles, places, tokens, counters, num_tiles = lists.split(sizes)
    arguments = KernelArguments(_ListParams)
    arguments.params.pairs = pairs
    arguments.bind(places=places, tokens=tokens, tiles=of_tiles, num_tiles=num_tiles)
    arguments.bind(written=written, counters=counters)
    of_thread = next(n for n in LIST_PAIRS if n * LIST_THREADS >= pairs.count)
    kernel = _list_kernel(of_thread, device)._replace(shared_bytes=8 * pairs.num_experts)
    nvrtc.launch(kernel, 1, LIST_THREADS, (arguments.params,), overlap=True)
    return Listed(Tiles(of_tiles, num_tiles, tiles), places, tokens, written, counters)


def compile_list(device: int) -> None:
    """Compile all that `list_pairs` may launch."""
    for of_thread in LIST_PAIRS:
        _list_kernel(of_thread, device)


def _list_kernel(of_thread: int, device: int) -> nvrtc.Kernel:
    macros = (("PAIRS", of_thread),)
    return nvrtc.load("moe/cuda/gemm_sm90/list.cu", macros, (("moe_list", 0),), device)["moe_list"]


@lru_cache(maxsize=4096)
def _map_of_x(address: int, rows: int, columns: int, dtype: torch.dtype, device: int) -> TensorMap:
    """Of x of down: one copy loads 8 rows x 128 k."""
    with current_device(device):
        return tensor_map_of_boxes(address, rows, columns, columns, dtype, 8, 2)
