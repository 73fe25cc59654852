"""What the launches of `gemm.cu` and `narrow.cu` share: parameters, tensor maps, kernels."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.kernels.runtime.tensor_maps import TensorMap, tensor_map
from halfbyte.linear.w4a16.gpu import dtype_macros, gpu_of
from halfbyte.moe.cuda.gemm_sm90.plan import (
    NARROW,
    STEP_K,
    STRIP,
    MoeGemmPlan,
    make_plan,
    row_pairs,
    steps,
)
from halfbyte.moe.cuda.launcher import product_arguments
from halfbyte.moe.cuda.packed import PackedMatrix, tile_bytes
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.experts import GatedActivation

THREADS = 384


class Tiles(NamedTuple):
    """Tiles of sorted pairs, as a kernel has listed them."""

    tiles: torch.Tensor
    """int32 `[2 max_tiles]`, see `Tile` in `work.cuh`."""
    num_tiles: torch.Tensor
    max_tiles: int


class Params(ctypes.Structure):
    """`Params` of `work.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "global_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("tiles", "num_tiles")),
        *((name, ctypes.c_int) for name in ("parts", "bias_dtype", "n", "steps")),
        *((name, ctypes.c_int) for name in ("matrix_tiles", "tile_bytes")),
        *((name, ctypes.c_int) for name in ("row_pairs", "max_tiles")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_offset")),
    )


def product_of(
    matrices: PackedMatrix, activation: GatedActivation | None, work: Work, found: Tiles
) -> KernelArguments:
    """Arguments of a product; without activation it is the second."""
    sizes = {
        "n": work.n,
        "steps": steps(work),
        "matrix_tiles": work.tiles,
        "tile_bytes": tile_bytes(work.k, work.weight_format),
        "row_pairs": row_pairs(work),
        "max_tiles": found.max_tiles,
    }
    arguments = product_arguments(Params, matrices, activation, **sizes)
    arguments.bind(weight=matrices.packed, tiles=found.tiles, num_tiles=found.num_tiles)
    return arguments


@lru_cache(maxsize=4096)
def kernel_of(
    work: Work, tokens: int, dtype: torch.dtype, device: int
) -> tuple[nvrtc.Kernel, MoeGemmPlan]:
    """The kernel of a product, and its plan."""
    plan = make_plan(work, tokens, gpu_of(device).block_bytes)
    kernel = product_kernel(dtype, plan, work, device)
    return kernel, plan


@lru_cache(maxsize=4096)
def product_kernel(dtype: torch.dtype, plan: MoeGemmPlan, work: Work, device: int) -> nvrtc.Kernel:
    """The kernel of a plan."""
    macros = (*dtype_macros(dtype), *plan.macros(work))
    functions = (("moe_gemm", plan.shared_bytes(work)),)
    source = "narrow.cu" if plan.tokens == NARROW else "gemm.cu"
    return nvrtc.load(f"moe/cuda/gemm_sm90/{source}", macros, functions, device)["moe_gemm"]


def padded(k: int) -> int:
    """k in whole steps."""
    return -(-k // STEP_K) * STEP_K


@lru_cache(maxsize=4096)
def map_of(
    address: int,
    rows: int,
    columns: int,
    stride: int,
    dtype: torch.dtype,
    box_rows: int,
    box_columns: int,
    device: int,
) -> TensorMap:
    """The tensor map of a matrix in memory."""
    with current_device(device):
        return tensor_map(address, rows, columns, stride, dtype, box_rows, box_columns)


def out_map(out: torch.Tensor, work: Work, device: int) -> TensorMap:
    """Of a product's results: one copy stores a strip of a warpgroup."""
    columns = out.shape[1] if work.gated else work.n
    box = STRIP, 32 if work.gated else 64
    return map_of(out.data_ptr(), out.shape[0], columns, out.shape[1], out.dtype, *box, device)
