"""Launcher of the W4A16 kernel for few rows of x on NVIDIA GPUs.

Weights are in the order of `linear_weights`. `linear.cu` streams them once for up to 32 rows of x,
at the speed of memory up to 16 or so.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels import nvrtc
from halfbyte.kernels.devices import Memory, allocate, current_device
from halfbyte.kernels.linear_machine import dtype_macros, machine_of
from halfbyte.kernels.linear_plan import (
    ROWS,
    UNIT_ROWS,
    FewPlan,
    few_plan,
    k_blocks,
    row_units,
)
from halfbyte.kernels.linear_weights import TILE_K, PackedWeight
from halfbyte.kernels.tensor_maps import (
    BOX_K,
    TensorMap,
    box_rows,
    row_stride,
    tensor_map_of_boxes,
)

_MOST_PARTIAL_BYTES = 2**28
"""Of sums that are joined through memory; those of more rows of x are computed in pieces."""
_NO_MAP = TensorMap()
"""Without TMA, x is read as the parameters say."""
_JOIN_THREADS = 256


class _FewWork(ctypes.Structure):
    """The fields of `_FewParams` that are the same in all calls with a shape and a plan."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "k", "units", "blocks", "groups")),
        ("round_units", ctypes.c_int),
    )


class _FewParams(ctypes.Structure):
    """`Params` of `linear.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "x")),
        *((name, ctypes.c_void_p) for name in ("bias", "out", "partial")),
        ("x_stride", ctypes.c_uint64),
        ("work", _FewWork),
    )


class _FewKernels(NamedTuple):
    few: nvrtc.Kernel
    join: nvrtc.Kernel


class _FewLaunch(NamedTuple):
    """What calls with a shape have in common."""

    plan: FewPlan
    m: int
    pad: int
    """Zeros that rows of x need."""
    pieces: int
    """Of x's rows, so that sums have room."""
    kernel: nvrtc.Kernel
    grid: int
    threads: int
    overlap: bool
    rows_of_box: int
    boxes: int
    """Of x, in a copy."""
    work: _FewWork
    out: Memory
    partial: Memory | None
    """Sums that are joined through memory."""
    join: nvrtc.Kernel
    join_grid: int


def linear_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool = False,
    plan: FewPlan | None = None,
) -> torch.Tensor:
    """x times NVFP4 weights, which pass through the registers once per 32 rows of x or fewer.

    Args:
        x: `[M, K]`, or `[..., K]` if it is contiguous, of the dtype that the weights are packed
            for; at least one row.
        weight, weight_scale, row_scale: as `linear_weights.PackedWeight` has them.
        bias: `[n]` of x's dtype, contiguous, or None.
        n: columns of the result.
        batch_invariant: work in a way that does not depend on M.
        plan: how to cut up the work; by default `few_plan`.

    Returns:
        `[..., n]`: sums in float32, times the global scale, plus the bias, rounded once.
    """
    device, dtype = x.device.index, x.dtype
    launch = _few_launch(x.shape, n, dtype, device, batch_invariant, plan)
    overlap, m, pad = launch.overlap, launch.m, launch.pad
    x = box_rows(torch.nn.functional.pad(x, (0, pad)) if pad else x)
    if launch.pieces > 1:  # a row's bits do not depend on how many there are
        parts = (weight, weight_scale, row_scale, bias, n)
        # Pieces are alike, or one of a single row might be left.
        pieces = x.view(m, x.shape[-1]).tensor_split(launch.pieces)
        outs = [linear_few(piece, *parts, plan=launch.plan) for piece in pieces]
        return torch.cat(outs).view(launch.out.shape)
    partial = None if launch.partial is None else allocate(launch.partial, device)
    out = allocate(launch.out, device)
    stride = row_stride(x)
    params = _FewParams(
        weight.data_ptr(),
        weight_scale.data_ptr(),
        row_scale.data_ptr(),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        None if partial is None else partial.data_ptr(),
        stride,
        launch.work,
    )
    x_map = _NO_MAP
    if overlap:
        with current_device(x):
            x_map = tensor_map_of_boxes(
                x.data_ptr(), m, x.shape[-1], stride, dtype, launch.rows_of_box, launch.boxes
            )
    nvrtc.launch(launch.kernel, launch.grid, launch.threads, (x_map, params), overlap=overlap)
    if partial is not None:
        nvrtc.launch(launch.join, launch.join_grid, _JOIN_THREADS, (params,), overlap=overlap)
    return out


@lru_cache(maxsize=4096)
def _few_launch(
    shape: torch.Size,
    n: int,
    dtype: torch.dtype,
    device: int,
    batch_invariant: bool,
    plan: FewPlan | None,
) -> _FewLaunch:
    *outer, k = shape
    m = shape.numel() // k
    machine = machine_of(device)
    overlap = machine.capability >= 90
    plan = plan or few_plan(n, k, m, machine, batch_invariant)
    kernels = _few_kernels(dtype, _few_macros(plan, n, k, m), machine.block_bytes, device)
    units = row_units(n)
    partial, pieces = None, 1
    if plan.joins_through_memory:
        columns = units * UNIT_ROWS
        pieces = -(-m // max(1, _MOST_PARTIAL_BYTES // (4 * plan.split * columns)))
        partial = Memory.contiguous((plan.split, m, columns), torch.float32)
    return _FewLaunch(
        plan,
        m=m,
        pad=-k % BOX_K if overlap else 0,
        pieces=pieces,
        kernel=kernels.few._replace(shared_bytes=plan.shared_bytes(n, k, m)),
        grid=plan.ctas_in_grid(m),
        threads=32 * plan.warps,
        overlap=overlap,
        rows_of_box=plan.rows_of_box(m),
        boxes=plan.piece_blocks(k) * (TILE_K // BOX_K),
        work=_FewWork(m, n, k, units, k_blocks(k), plan.groups, plan.round_units),
        out=Memory.contiguous((*outer, n), dtype),
        partial=partial,
        join=kernels.join,
        join_grid=-(-m * units * UNIT_ROWS // _JOIN_THREADS),
    )


def compile_few(packed: PackedWeight, batch_invariant: bool, device: int) -> None:
    """Compile all that calls with a weight may need, so that none does in a graph's capture."""
    machine = machine_of(device)
    n, k = packed.n, packed.k
    plans = {m: few_plan(n, k, m, machine, batch_invariant) for m in ROWS}
    variants = {_few_macros(plan, n, k, m) for m, plan in plans.items()}

    def compile_one(macros: tuple[tuple[str, int], ...]) -> None:
        _few_kernels(packed.dtype, macros, machine.block_bytes, device)

    with ThreadPoolExecutor(len(variants)) as pool:
        list(pool.map(compile_one, variants))


def _few_macros(plan: FewPlan, n: int, k: int, m: int) -> tuple[tuple[str, int], ...]:
    return (*plan.macros(), *plan.macros_of_shape(n, k, m))


@lru_cache(maxsize=4096)
def _few_kernels(
    dtype: torch.dtype, macros: tuple[tuple[str, int], ...], block_bytes: int, device: int
) -> _FewKernels:
    kernels = nvrtc.load(
        "linear",
        (*dtype_macros(dtype), *macros),
        (("linear_few", block_bytes), ("linear_join", 0)),
        device,
    )
    return _FewKernels(kernels["linear_few"], kernels["linear_join"])
