"""Launcher of the W4A16 GEMM kernel on SM90: unpacking inside a `wgmma` matmul.

Weights are in the order of `packed_weight`. See `gemm.cu` for how it works.
"""

import ctypes
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from struct import Struct
from typing import Any

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import Memory, allocate, current_device, num_sms
from halfbyte.kernels.runtime.tensor_maps import (
    MAPS,
    SHAPES,
    TensorMap,
    box_rows,
    row_stride,
    tensor_map,
)
from halfbyte.linear.w4a16.gemm_sm90.plan import (
    MAX_SHARERS,
    STRIP,
    SWIGLU_TILES,
    TILES,
    GemmPlan,
    Tile,
    make_plan,
    max_sharers,
)
from halfbyte.linear.w4a16.packed_weight import TILE_N

_ONE = 2**31
"""Scale of fixed-point inverses; `x / by` is exact where `x * by` is less than this."""


SWIGLU_MULTIPLE = 128
"""Rows of W come in multiples of this where the kernel applies SwiGLU: blocks of gate and up."""
_FLAG_EPOCHS = count(secrets.randbits(64), 2)
"""Two flag values, unique per launch, so that flags need no clearing before it. A CUDA graph's
replays reuse them: a launch resets its flags before it ends."""


class _KnownDivisor(ctypes.Structure):
    """`KnownDivisor` of `work.cuh`, for dividends below `_ONE / by`."""

    _fields_ = (("by", ctypes.c_uint32), ("inverse", ctypes.c_uint32))


class _Work(ctypes.Structure):
    """Fields of `Params` that depend only on the shape and the plan."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "blocks_n", "steps")),
        *((name, ctypes.c_int) for name in ("tiles", "cut_tiles", "crossing")),
        *((name, _KnownDivisor) for name in ("row_pairs", "line", "clusters")),
        *((name, ctypes.c_uint32) for name in ("span", "more")),
        ("clusters_per_place", ctypes.c_float),
    )


class _Params(ctypes.Structure):
    """`Params` of `work.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("partial", "flags")),
        ("flag_epoch", ctypes.c_uint64),
        ("work", _Work),
    )


_pack_params = Struct(f"6PQ{ctypes.sizeof(_Work)}s0P").pack
"""Packs `_Params`: with `from_buffer_copy`, in half the time of its constructor."""


class GemmProduct:
    """Calls with one shape of x; arguments as of `halfbyte.linear.w4a16.gemv.launcher.GemvProduct`.

    Args:
        plan: how to split the work; by default from `make_plan`.
        swiglu: whether W has n / 2 rows of gate, then as many of up, and the result is
            `silu(gate) * up`, of values rounded to the dtype.

    Raises:
        ValueError: the kernel does not support the plan or the size.
    """

    def __init__(
        self,
        shape: torch.Size,
        n: int,
        dtype: torch.dtype,
        device: int,
        plan: GemmPlan | None,
        swiglu: bool = False,
    ) -> None:
        *outer, k = shape
        m = shape.numel() // k
        plan = plan or make_plan(n, k, m, num_sms(device), swiglu=swiglu)
        if swiglu and (n % SWIGLU_MULTIPLE or plan.tile.groups != 2):
            raise ValueError(f"{plan}, n={n}: SwiGLU needs n % {SWIGLU_MULTIPLE} == 0, two groups")
        tile, steps = plan.tile, plan.steps(k)
        if max_sharers(plan, steps) > MAX_SHARERS:
            raise ValueError(f"{plan}: more than {MAX_SHARERS} clusters share a tile")
        self._kernel = _kernel(dtype, tile, device, swiglu)
        self._grid = 2 * plan.clusters
        self._threads = 128 * (tile.groups + 1)
        self._k, self._device = k, device
        self._work = bytes(_Work(m, n, -(-n // TILE_N), steps, **work(plan, n, k, m)))
        # TMA writes rows of a multiple of 16 bytes.
        self._n = n // 2 if swiglu else n
        columns = -(-self._n // 8) * 8
        self._cut_out = columns > self._n
        self._out = Memory.contiguous((*outer, columns), dtype)
        # With at least one cut tile per cluster, only tails (`work.cuh`) store partial sums.
        kinds = (plan.cut_tiles > 0) + (0 < plan.cut_tiles < plan.clusters)
        places = kinds * 2 * plan.clusters
        self._partial_bytes = 4 * places * tile.values_of_pair // 2
        flag_bytes = 8 * 2 * tile.groups * plan.clusters * MAX_SHARERS
        # Without cut tiles, clusters exchange nothing.
        words = (self._partial_bytes + flag_bytes) // 8 if plan.cut_tiles else 0
        self._workspace = Memory.contiguous((words,), torch.int64) if words else None

        @lru_cache(maxsize=MAPS)
        def x_map(address: int, stride: int) -> TensorMap:
            with current_device(device):
                return tensor_map(address, m, k, stride, dtype, tile.tokens // 2)

        @lru_cache(maxsize=MAPS)
        def out_map(address: int) -> TensorMap:
            with current_device(device):
                return tensor_map(address, m, columns, columns, dtype, STRIP)

        self._x_map, self._out_map = x_map, out_map

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        row_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """x times NVFP4 weights; arguments as `halfbyte.linear.w4a16.gemv.launcher.run`.

        Returns:
            `[..., n]`: accumulated in float32, times the global scale, plus the bias, rounded once.
            With SwiGLU `[..., n / 2]`.
        """
        address, stride = x.data_ptr(), self._k
        if address % 16 or not x.is_contiguous():
            x = box_rows(x)
            address, stride = x.data_ptr(), row_stride(x)
        out = allocate(self._out, self._device)
        partial = flags = 0
        if self._workspace is not None:
            workspace = allocate(self._workspace, self._device)
            partial = workspace.data_ptr()
            flags = partial + self._partial_bytes
        params = _Params.from_buffer_copy(
            _pack_params(
                weight.data_ptr(),
                weight_scale.data_ptr(),
                row_scale.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                partial,
                flags,
                next(_FLAG_EPOCHS) % 2**64,
                self._work,
            )
        )
        arguments = self._x_map(address, stride), self._out_map(out.data_ptr()), params
        nvrtc.launch(self._kernel, self._grid, self._threads, arguments, overlap=True)
        return out[..., : self._n].contiguous() if self._cut_out else out


gemm_product = lru_cache(maxsize=SHAPES)(GemmProduct)
"""Cached per shape."""


def work(plan: GemmPlan, n: int, k: int, m: int) -> dict[str, Any]:
    """A plan as fields of `_Work`.

    Raises:
        ValueError: the size overflows the kernel's fixed-point divisions.
    """
    pairs, line = plan.tile.row_pairs(n), plan.steps(k) + plan.crossing
    tiles, places = plan.tile.pairs(n, m), plan.cut_tiles * line
    if max(tiles * pairs, places * line, plan.clusters**3) >= _ONE:
        raise ValueError(f"n={n}, k={k}, m={m}: too large")
    if 0 < places < plan.clusters:
        raise ValueError(f"{plan}: {places} steps to share among {plan.clusters} clusters")
    return {
        "tiles": tiles,
        "cut_tiles": plan.cut_tiles,
        "crossing": plan.crossing,
        "row_pairs": _divisor(pairs),
        "line": _divisor(line),
        "clusters": _divisor(plan.clusters),
        "span": places // plan.clusters,
        "more": places % plan.clusters,
        "clusters_per_place": plan.clusters / max(places, 1),
    }


def _divisor(by: int) -> _KnownDivisor:
    return _KnownDivisor(by, -(-_ONE // by))


@lru_cache(maxsize=64)
def compile_gemm(dtype: torch.dtype, device: int, swiglu: bool = False) -> None:
    """Compile every kernel that calls may need, so that graph capture compiles nothing."""
    tiles = SWIGLU_TILES if swiglu else TILES
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tile: _kernel(dtype, tile, device, swiglu), tiles))


@lru_cache(maxsize=128)
def _kernel(dtype: torch.dtype, tile: Tile, device: int, swiglu: bool) -> nvrtc.Kernel:
    functions = (("linear_gemm", shared_bytes(tile)),)
    options = tuple(macros(dtype, tile, swiglu).items())
    return nvrtc.load("linear/w4a16/gemm_sm90/gemm.cu", options, functions, device)["linear_gemm"]


def shared_bytes(tile: Tile) -> int:
    """Dynamic shared memory of a CTA: the ring's stages, the output tile, flags."""
    rows, tokens = tile.rows, tile.tokens
    stage = (tokens * 2 + rows // 2 + rows // 16) * tile.step + 16
    return tile.stages * stage + tokens * rows * 2 + 16


def macros(dtype: torch.dtype, tile: Tile, swiglu: bool = False) -> dict[str, int | None]:
    """Macros that `gemm.cu` is compiled with."""
    return {
        "X_BF16": int(dtype == torch.bfloat16),
        "TOKENS": tile.tokens,
        "STEP": tile.step,
        "GROUPS": tile.groups,
        "STAGES": tile.stages,
        "SWIGLU": int(swiglu),
    }
