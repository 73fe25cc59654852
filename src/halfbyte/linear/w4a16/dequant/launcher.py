"""Launcher of the kernel that dequantizes NVFP4 weights to 16 bits, and the product by cuBLAS.

Weights are in the order of `packed_weight`. See `dequant.cu` for how it works.
"""

import ctypes

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.tensor_maps import box_rows
from halfbyte.linear.w4a16.gpu import dtype_macros
from halfbyte.linear.w4a16.packed_weight import TILE_N

_MAX_UNPACKED_BYTES = 2**28
"""Max bytes of dequantized weights; larger weights are processed in chunks of rows."""
_THREADS = 128
_BLOCKS = 4
"""Blocks of 64 k per CTA."""


class _Params(ctypes.Structure):
    """`Params` of `dequant.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "out")),
        *((name, ctypes.c_int) for name in ("rows", "k", "blocks")),
    )


def linear_unpacked(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """x times NVFP4 weights, which are dequantized to x's dtype first.

    Arguments as of `gemv.launcher.run`; can be captured in a CUDA graph. The workspace
    comes from PyTorch's allocator and is freed after the call, so that layers share it.
    """
    x = box_rows(x)  # the alignment that cuBLAS needs as well
    *outer, k = x.shape
    rows = _MAX_UNPACKED_BYTES // (x.element_size() * k) // TILE_N * TILE_N
    if n <= rows:
        unpacked = unpack(weight, weight_scale, row_scale, 0, n, k, x.dtype)
        return torch.nn.functional.linear(x, unpacked, bias)
    x = x.reshape(-1, k)
    out = x.new_empty(x.shape[0], n)
    for start in range(0, n, rows):
        chunk = slice(start, min(n, start + rows))
        unpacked = unpack(
            weight, weight_scale, row_scale, start, chunk.stop - start, k, x.dtype
        ).t()
        if bias is None:
            torch.mm(x, unpacked, out=out[:, chunk])
        else:
            torch.addmm(bias[chunk], x, unpacked, out=out[:, chunk])
    return out.view(*outer, n)


def unpack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    first_row: int,
    rows: int,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantized weights `[rows, k]`, bit for bit as `numerics.nvfp4.dequantize` gives them.

    Args:
        weight, weight_scale, row_scale: the tensors of `PackedWeight`.
        first_row: a multiple of 64.
        rows: how many rows from there.
        k: K without padding.
        dtype: the dtype that the weights are packed for.
    """
    device = weight.device.index
    tile, tiles = first_row // TILE_N, -(-rows // TILE_N)
    blocks = weight.shape[1]
    out = weight.new_empty(rows, k, dtype=dtype)
    params = _Params(
        _address(weight, tile),
        _address(weight_scale, tile),
        _address(row_scale, first_row),
        out.data_ptr(),
        rows,
        k,
        blocks,
    )
    kernel = _kernel(dtype, device)
    grid = tiles * -(-blocks // _BLOCKS)
    nvrtc.launch(kernel, grid, _THREADS, (params,), overlap=True)
    return out


def _address(tensor: torch.Tensor, index: int) -> int:
    """Address of `tensor[index]`, without making a view."""
    return tensor.data_ptr() + index * tensor.stride(0) * tensor.element_size()


def compile_unpack(dtype: torch.dtype, device: int) -> None:
    """Compile the kernel, so that graph capture compiles nothing."""
    _kernel(dtype, device)


def _kernel(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    functions = (("linear_unpack", 0),)
    return nvrtc.load("linear/w4a16/dequant/dequant.cu", dtype_macros(dtype), functions, device)[
        "linear_unpack"
    ]
