"""Batch-invariant matrix products on a CPU: C++ that sums over k in order."""

import ctypes

import torch

from halfbyte.kernels.cpu.library import FLOATS, library

_COLUMNS = 64
"""Rows of the result are padded to a multiple of it."""


class _Call(ctypes.Structure):
    """`DenseCall` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "n", "k")),
        *((name, ctypes.c_int64) for name in ("x_stride", "n_stride", "k_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("format", "threads")),
    )


def product_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in float32, from values of one dtype.

    Every value is accumulated in float32 over k in order, for any number of rows. Without the C++
    library and for other dtypes, PyTorch multiplies row by row.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`.

    Returns:
        float32 `[M, N]` (float64 for float64).
    """
    (m, k), n = x.shape, weight.shape[0]
    loaded = library()
    if weight.dtype not in FLOATS or loaded is None or not m * n * k:
        return _row_by_row(x, weight)
    if 1 not in weight.stride():
        weight = weight.contiguous()
    # A matrix with one column may have two strides of 1; that of k is used.
    n_stride, k_stride = weight.stride()
    rows = x.float().contiguous()
    out = rows.new_empty(m, -(-n // _COLUMNS) * _COLUMNS)
    call = _Call(
        x=rows.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        rows=m,
        n=n,
        k=k,
        x_stride=rows.stride(0),
        n_stride=n_stride,
        k_stride=k_stride,
        out_stride=out.stride(0),
        format=FLOATS[weight.dtype],
        threads=torch.get_num_threads(),
    )
    loaded.halfbyte_dense(bytes(call))
    return out[:, :n]


def _row_by_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    weight = weight.to(wide).contiguous()
    if not len(x):
        return weight.new_zeros(0, len(weight))
    return torch.cat([row[None] @ weight.t() for row in x.to(wide)])
