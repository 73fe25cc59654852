"""Launcher of the W4A16 GEMV kernel (small M) on NVIDIA GPUs.

Weights are in the order of `packed_weight`. `gemv.cu` reads them once per 32 tokens; up to about 16
tokens the kernel is bound by memory bandwidth.
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
    PLANNED_M,
    UNIT_ROWS,
    GemvPlan,
    k_blocks,
    make_plan,
    row_units,
)
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.linear.w4a16.packed_weight import TILE_K, PackedWeight

_MAX_PARTIAL_BYTES = 2**28
"""Max bytes of partial sums in global memory; a larger M is computed in chunks."""
_NO_MAP = TensorMap()
"""Placeholder before SM90: x is read from the pointer in the parameters, without TMA."""
_JOIN_THREADS = 256


class _GemvWork(ctypes.Structure):
    """Fields of `_GemvParams` that depend only on the shape and the plan."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "k", "units", "blocks", "groups")),
        ("round_units", ctypes.c_int),
    )


class _GemvParams(ctypes.Structure):
    """`Params` of `gemv.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "x")),
        *((name, ctypes.c_void_p) for name in ("bias", "out", "partial")),
        ("x_stride", ctypes.c_uint64),
        ("work", _GemvWork),
    )


_pack_params = Struct(f"7PQ{ctypes.sizeof(_GemvWork)}s0P").pack
"""Packs `_GemvParams`: with `from_buffer_copy`, in half the time of its constructor."""


class _GemvKernels(NamedTuple):
    gemv: nvrtc.Kernel
    join: nvrtc.Kernel


class GemvProduct:
    """Calls with one shape of x: the plan, kernels and parameters that they share.

    Args:
        shape: of x, `[..., K]`.
        n: output features.
        dtype: of x and the result.
        device: index of the GPU.
        batch_invariant: use an order of summation that does not depend on M.
        plan: how to split the work; by default from `make_plan`.
    """

    def __init__(
        self,
        shape: torch.Size,
        n: int,
        dtype: torch.dtype,
        device: int,
        batch_invariant: bool,
        plan: GemvPlan | None,
    ) -> None:
        *outer, k = shape
        m = shape.numel() // k
        gpu = gpu_of(device)
        self._plan = plan = plan or make_plan(n, k, m, gpu, batch_invariant)
        units = row_units(n)
        self._m, self._n, self._device = m, n, device
        self._out = Memory.contiguous((*outer, n), dtype)
        self._partial: Memory | None = None
        self._chunks = 1  # chunks of x, so that partial sums fit into memory
        if plan.joins_through_memory:
            columns = units * UNIT_ROWS
            self._chunks = -(-m // max(1, _MAX_PARTIAL_BYTES // (4 * plan.split * columns)))
            self._partial = Memory.contiguous((plan.split, m, columns), torch.float32)
        kernels = _gemv_kernels(dtype, _gemv_macros(plan, n, k, m), gpu.block_bytes, device)
        self._kernel = kernels.gemv._replace(shared_bytes=plan.shared_bytes(n, k, m))
        self._grid, self._threads = plan.ctas_in_grid(m), 32 * plan.warps
        self._join, self._join_grid = kernels.join, -(-m * units * UNIT_ROWS // _JOIN_THREADS)
        self._work = bytes(_GemvWork(m, n, k, units, k_blocks(k), plan.groups, plan.round_units))
        has_tma = gpu.compute_capability >= 90
        self._pad = -k % BOX_K if has_tma else 0  # TMA reads whole boxes: K is padded with zeros
        self._k = k = k + self._pad
        tokens_of_box, boxes = plan.tokens_of_box(m), plan.slice_blocks(k) * (TILE_K // BOX_K)

        @lru_cache(maxsize=MAPS)
        def x_map(address: int, stride: int) -> TensorMap:
            if not has_tma:
                return _NO_MAP
            with current_device(device):
                return tensor_map_of_boxes(address, m, k, stride, dtype, tokens_of_box, boxes)

        self._x_map = x_map

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        row_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product, as `run`."""
        if self._pad:
            x = torch.nn.functional.pad(x, (0, self._pad))
        address, stride = x.data_ptr(), self._k
        if address % 16 or not x.is_contiguous():
            x = box_rows(x)
            address, stride = x.data_ptr(), row_stride(x)
        if self._chunks > 1:  # the plan stays, so a token's bits do not depend on the chunks
            parts = (weight, weight_scale, row_scale, bias, self._n)
            # Chunks of nearly equal size: a remainder of one token would need another kernel.
            chunks = x.view(self._m, x.shape[-1]).tensor_split(self._chunks)
            outs = [run(chunk, *parts, plan=self._plan) for chunk in chunks]
            return torch.cat(outs).view(self._out.shape)
        partial = None if self._partial is None else allocate(self._partial, self._device)
        out = allocate(self._out, self._device)
        params = _GemvParams.from_buffer_copy(
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
        nvrtc.launch(
            *(self._kernel, self._grid, self._threads, arguments),
            overlap=True,
            ctas_per_sm=self._plan.ctas,
        )
        if partial is not None:
            nvrtc.launch(self._join, self._join_grid, _JOIN_THREADS, (params,), overlap=True)
        return out


gemv_product = lru_cache(maxsize=SHAPES)(GemvProduct)
"""Cached per shape."""


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    batch_invariant: bool = False,
    plan: GemvPlan | None = None,
) -> torch.Tensor:
    """x times NVFP4 weights; the weights are read once per up to 32 tokens.

    Args:
        x: `[M, K]`, or `[..., K]` if it is contiguous, of the dtype that the weights are packed
            for; M >= 1.
        weight, weight_scale, row_scale: the tensors of `PackedWeight`.
        bias: `[n]` of x's dtype, contiguous, or None.
        n: output features.
        batch_invariant: use an order of summation that does not depend on M.
        plan: how to split the work; by default from `make_plan`.

    Returns:
        `[..., n]`: accumulated in float32, times the global scale, plus the bias, rounded once.
    """
    product = gemv_product(x.shape, n, x.dtype, x.get_device(), batch_invariant, plan)
    return product(x, weight, weight_scale, row_scale, bias)


def compile_gemv(packed: PackedWeight, batch_invariant: bool, device: int) -> None:
    """Compile every kernel that a weight may need, so that graph capture compiles nothing."""
    gpu = gpu_of(device)
    n, k = packed.n, packed.k
    plans = {m: make_plan(n, k, m, gpu, batch_invariant) for m in PLANNED_M}
    variants = {_gemv_macros(plan, n, k, m) for m, plan in plans.items()}

    def compile_one(macros: tuple[tuple[str, int], ...]) -> None:
        _gemv_kernels(packed.dtype, macros, gpu.block_bytes, device)

    with ThreadPoolExecutor(len(variants)) as pool:
        list(pool.map(compile_one, variants))


def _gemv_macros(plan: GemvPlan, n: int, k: int, m: int) -> tuple[tuple[str, int], ...]:
    return (*plan.macros(), *plan.macros_of_shape(n, k, m))


@lru_cache(maxsize=4096)
def _gemv_kernels(
    dtype: torch.dtype, macros: tuple[tuple[str, int], ...], block_bytes: int, device: int
) -> _GemvKernels:
    kernels = nvrtc.load(
        "linear/w4a16/gemv/gemv.cu",
        (*dtype_macros(dtype), *macros),
        (("linear_gemv", block_bytes), ("linear_join", 0)),
        device,
    )
    return _GemvKernels(kernels["linear_gemv"], kernels["linear_join"])
