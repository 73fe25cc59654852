"""Launcher of the W4A16 kernel for few rows of x on NVIDIA GPUs.

Weights are in the order of `packed_weight`. `gemv.cu` streams them once for up to 32 rows of x,
at the speed of memory up to 16 or so.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import Memory, allocate, current_device
from halfbyte.kernels.runtime.tensor_maps import (
    BOX_K,
    MAPS,
    SHAPES,
    TensorMap,
    box_rows,
    row_stride,
    tensor_map_of_boxes,
)
from halfbyte.linear.w4a16.gemv.plan import (
    ROWS,
    UNIT_ROWS,
    FewPlan,
    few_plan,
    k_blocks,
    row_units,
)
from halfbyte.linear.w4a16.machine import dtype_macros, machine_of
from halfbyte.linear.w4a16.packed_weight import TILE_K, PackedWeight

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
    """`Params` of `gemv.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "x")),
        *((name, ctypes.c_void_p) for name in ("bias", "out", "partial")),
        ("x_stride", ctypes.c_uint64),
        ("work", _FewWork),
    )


_pack_params = Struct(f"7PQ{ctypes.sizeof(_FewWork)}s0P").pack
"""Bytes of `_FewParams`: with `from_buffer_copy` half of the time that its constructor takes."""


class _FewKernels(NamedTuple):
    few: nvrtc.Kernel
    join: nvrtc.Kernel


class FewProduct:
    """Calls with a shape: what they have in common is worked out once.

    Args:
        shape: of x, `[..., K]`.
        n: columns of the result.
        dtype: of x and the result.
        device: index of the GPU.
        batch_invariant: work in a way that does not depend on the rows.
        plan: how to cut up the work; by default `few_plan`.
    """

    def __init__(
        self,
        shape: torch.Size,
        n: int,
        dtype: torch.dtype,
        device: int,
        batch_invariant: bool,
        plan: FewPlan | None,
    ) -> None:
        *outer, k = shape
        m = shape.numel() // k
        machine = machine_of(device)
        self._plan = plan = plan or few_plan(n, k, m, machine, batch_invariant)
        units = row_units(n)
        self._m, self._n, self._device = m, n, device
        self._out = Memory.contiguous((*outer, n), dtype)
        self._partial: Memory | None = None
        self._pieces = 1  # of x's rows, so that sums have room
        if plan.joins_through_memory:
            columns = units * UNIT_ROWS
            self._pieces = -(-m // max(1, _MOST_PARTIAL_BYTES // (4 * plan.split * columns)))
            self._partial = Memory.contiguous((plan.split, m, columns), torch.float32)
        kernels = _few_kernels(dtype, _few_macros(plan, n, k, m), machine.block_bytes, device)
        self._kernel = kernels.few._replace(shared_bytes=plan.shared_bytes(n, k, m))
        self._grid, self._threads = plan.ctas_in_grid(m), 32 * plan.warps
        self._join, self._join_grid = kernels.join, -(-m * units * UNIT_ROWS // _JOIN_THREADS)
        self._work = bytes(_FewWork(m, n, k, units, k_blocks(k), plan.groups, plan.round_units))
        has_tma = machine.capability >= 90
        self._pad = -k % BOX_K if has_tma else 0  # TMA reads whole boxes of K: zero padding
        self._k = k = k + self._pad
        rows_of_box, boxes = plan.rows_of_box(m), plan.piece_blocks(k) * (TILE_K // BOX_K)

        @lru_cache(maxsize=MAPS)
        def x_map(address: int, stride: int) -> TensorMap:
            if not has_tma:  # x is read as the parameters say
                return _NO_MAP
            with current_device(device):
                return tensor_map_of_boxes(address, m, k, stride, dtype, rows_of_box, boxes)

        self._x_map = x_map

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        row_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `linear_few`."""
        if self._pad:
            x = torch.nn.functional.pad(x, (0, self._pad))
        address, stride = x.data_ptr(), self._k
        if address % 16 or not x.is_contiguous():
            x = box_rows(x)
            address, stride = x.data_ptr(), row_stride(x)
        if self._pieces > 1:  # a row's bits do not depend on how many there are
            parts = (weight, weight_scale, row_scale, bias, self._n)
            # Pieces are alike, or one of a single row might be left.
            pieces = x.view(self._m, x.shape[-1]).tensor_split(self._pieces)
            outs = [linear_few(piece, *parts, plan=self._plan) for piece in pieces]
            return torch.cat(outs).view(self._out.shape)
        partial = None if self._partial is None else allocate(self._partial, self._device)
        out = allocate(self._out, self._device)
        params = _FewParams.from_buffer_copy(
            _pack_params(
                weight.data_ptr(),
                weight_scale.data_ptr(),
                row_scale.data_ptr(),
                address,
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                0 if partial is None else partial.data_ptr(),
                stride,
                self._work,
            )
        )
        arguments = self._x_map(address, stride), params
        nvrtc.launch(self._kernel, self._grid, self._threads, arguments, overlap=True)
        if partial is not None:
            nvrtc.launch(self._join, self._join_grid, _JOIN_THREADS, (params,), overlap=True)
        return out


few_product = lru_cache(maxsize=SHAPES)(FewProduct)
"""What is kept for a shape."""


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
        weight, weight_scale, row_scale: as `PackedWeight` has them.
        bias: `[n]` of x's dtype, contiguous, or None.
        n: columns of the result.
        batch_invariant: work in a way that does not depend on M.
        plan: how to cut up the work; by default `few_plan`.

    Returns:
        `[..., n]`: sums in float32, times the global scale, plus the bias, rounded once.
    """
    product = few_product(x.shape, n, x.dtype, x.get_device(), batch_invariant, plan)
    return product(x, weight, weight_scale, row_scale, bias)


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
        "linear/w4a16/gemv/gemv.cu",
        (*dtype_macros(dtype), *macros),
        (("linear_few", block_bytes), ("linear_join", 0)),
        device,
    )
    return _FewKernels(kernels["linear_few"], kernels["linear_join"])
