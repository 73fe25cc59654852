"""TMA tensor maps (SM90 and later), and copies of x whose rows TMA can read."""

import ctypes
from functools import lru_cache

import torch

BOX_K = 64
"""Values of a row in a box: 128 bytes."""
SHAPES = 1024
"""Max cached products (shapes of x and weights)."""
MAPS = 64
"""Max cached tensor maps per shape, about 480 bytes each. Without a CUDA graph, the allocator
reuses the same addresses after some layers."""


class TensorMap(ctypes.Structure):
    """A kernel argument; `TensorMap` of `sm90.cuh`."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(
    address: int,
    m: int,
    k: int,
    stride: int,
    dtype: torch.dtype,
    rows: int,
    columns: int = BOX_K,
) -> TensorMap:
    """Tensor map of a matrix `[m, k]` with boxes of `rows` x 64 values.

    Values beyond the matrix are read as zeros and not written. The swizzle is that of the width of
    a box, 128 bytes by default; none for boxes of one row.

    Args:
        address: of the first value, a multiple of 16.
        m, k: rows and columns.
        stride: values from row to row, a multiple of 8, at least k.
        dtype: bfloat16 or float16.
        rows: of a box, up to 256.
        columns: of a box, 16, 32 or 64.

    Raises:
        RuntimeError: the driver returned an error.
    """
    return _encode(address, (k, m), (2 * stride,), (columns, rows), dtype)


def tensor_map_of_boxes(
    address: int, m: int, k: int, stride: int, dtype: torch.dtype, rows: int, boxes: int
) -> TensorMap:
    """Tensor map with which one copy loads several boxes of `rows` x 64 values along k,
    consecutively.

    k is a multiple of 64; other arguments as of `tensor_map`. Of the map's three dimensions (64
    values, rows, boxes) the last has a smaller stride than the second, which TMA allows.
    """
    if k % BOX_K:
        raise ValueError(f"k: expected a multiple of {BOX_K}, got {k}")
    sizes, strides = (BOX_K, m, k // BOX_K), (2 * stride, 2 * BOX_K)
    return _encode(address, sizes, strides, (BOX_K, rows, boxes), dtype)


@lru_cache(maxsize=4096)
def tensor_map_of_pages(
    address: int, pages: int, rows: int, row_bytes: int, stride: int
) -> TensorMap:
    """Tensor map with which one copy loads a page of `rows` x `row_bytes` bytes.

    The swizzle is that of `row_bytes`.

    Args:
        address: of the first page, a multiple of 16.
        pages: number of pages.
        rows: up to 256.
        row_bytes: 32, 64 or 128.
        stride: bytes from page to page, a multiple of 16. The documentation requires a
            multiple of `row_bytes`; the tested driver (H200) accepts others as well.

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
    """Encode a tensor map; strides in bytes, of all dimensions except for the first."""
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
    """x, or a copy, with contiguous rows that are aligned to 16 bytes and do not overlap.

    Args:
        x: `[M, K]`, or `[..., K]` if it is contiguous.

    Raises:
        ValueError: K is not a multiple of 8, so rows cannot all be aligned.
    """
    k = x.shape[-1]
    if k % 8:
        raise ValueError(f"x: TMA reads rows of a multiple of 8 values, not {k}")
    if x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    if x.is_contiguous():  # true for a single row with any stride
        return x
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= k:
        return x
    return x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Stride of rows, in values, of a result of `box_rows`; K for a single row."""
    return x.shape[-1] if x.is_contiguous() else x.stride(0)
