"""TMA's descriptions of matrices in memory (SM90 and later), and rows as TMA can read them."""

import ctypes
from functools import lru_cache

import torch

BOX_K = 64
"""Values of a row in a box: 128 bytes."""
SHAPES = 1024
"""Of x and weights, whose calls are prepared for."""
MAPS = 64
"""That calls with a shape keep, each of some 480 bytes: without a graph, a model's tensors lie
where they lay some layers before."""


class TensorMap(ctypes.Structure):
    """A kernel's argument; `TensorMap` of `sm90.cuh`."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(
    address: int, m: int, k: int, stride: int, dtype: torch.dtype, rows: int
) -> TensorMap:
    """A matrix `[m, k]`, of which boxes of `rows` x 64 values are copied.

    What a box has beyond the matrix is read as zeros, and not written. Chunks of 16 bytes are
    exchanged as the 128-byte swizzle says, but those of a single row stay in place.

    Args:
        address: of the first value, a multiple of 16.
        m, k: rows and columns.
        stride: values from row to row, a multiple of 8, at least k.
        dtype: bfloat16 or float16.
        rows: of a box, up to 256.

    Raises:
        RuntimeError: the driver refuses it.
    """
    return _encode(address, (k, m), (2 * stride,), (BOX_K, rows), dtype)


def tensor_map_of_boxes(
    address: int, m: int, k: int, stride: int, dtype: torch.dtype, rows: int, boxes: int
) -> TensorMap:
    """The same matrix, as boxes of `rows` x 64 values of which so many, along k, are one copy.

    They come one after another. k is a multiple of 64; otherwise as `tensor_map`. Of the map's
    three dimensions (64 values, rows, boxes) the last has the smaller stride, as it may.
    """
    if k % BOX_K:
        raise ValueError(f"k: expected a multiple of {BOX_K}, got {k}")
    sizes, strides = (BOX_K, m, k // BOX_K), (2 * stride, 2 * BOX_K)
    return _encode(address, sizes, strides, (BOX_K, rows, boxes), dtype)


@lru_cache(maxsize=4096)
def tensor_map_of_pages(
    address: int, pages: int, rows: int, row_bytes: int, stride: int
) -> TensorMap:
    """Pages of `rows` x `row_bytes` bytes, of which a copy brings a whole one.

    Its chunks of 16 bytes are exchanged as the swizzle of such rows says.

    Args:
        address: of the first page, a multiple of 16.
        pages: that there are.
        rows: up to 256.
        row_bytes: 32, 64 or 128.
        stride: bytes from page to page, a multiple of 16. The driver's documentation asks for a
            multiple of `row_bytes`; the driver that was tested, on an H200, takes others, too.

    Raises:
        RuntimeError: the driver refuses it.
    """
    sizes, box = (row_bytes, rows, pages), (row_bytes, rows, 1)
    return _encode(address, sizes, (row_bytes, stride), box, torch.uint8)


def _encode(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: torch.dtype,
) -> TensorMap:
    """A map of values; strides are bytes, of all dimensions but the first."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.uint8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    swizzle = {
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[box[0] * dtype.itemsize]
    status, made = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1) for _ in box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle if box[1] > 1 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(
            f"CUDA: {status.name} for a tensor of {sizes} values, {strides} bytes apart"
        )
    made_here = TensorMap()
    ctypes.memmove(ctypes.addressof(made_here), made.getPtr(), ctypes.sizeof(made_here))
    return made_here


def box_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with rows contiguous, aligned to 16 bytes, and apart from each other.

    Args:
        x: `[M, K]`, or `[..., K]` if it is contiguous.

    Raises:
        ValueError: K is not a multiple of 8, so that not all rows can be aligned.
    """
    k = x.shape[-1]
    if k % 8:
        raise ValueError(f"x: TMA reads rows of a multiple of 8 values, not {k}")
    if x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    if x.is_contiguous():  # a single row is, whatever its stride
        return x
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= k:
        return x
    return x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Values from row to row of x as `box_rows` gives it; K for a single row."""
    return x.shape[-1] if x.is_contiguous() else x.stride(0)
