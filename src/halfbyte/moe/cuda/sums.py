"""Launches the kernel that adds up a token's results."""

import ctypes

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import allocate, contiguous_memory
from halfbyte.kernels.runtime.parameters import KernelArguments
from halfbyte.linear.w4a16.gpu import dtype_macros
from halfbyte.moe.cuda.pairs import Pairs

_THREADS, _COLUMNS, _SORTED_COLUMNS = 128, 4, 8
"""Threads of a CTA, and columns of a thread."""


class _Params(ctypes.Structure):
    """`Params` of `sum.cu` for results in the order of pairs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("results", "out")),
        ("pairs", Pairs),
        *((name, ctypes.c_int) for name in ("n", "blocks")),
    )


class _SortedParams(ctypes.Structure):
    """`Params` of `sum.cu` for sorted results."""

    _fields_ = (
        *_Params._fields_,
        ("stride", ctypes.c_int),
        ("places", ctypes.c_void_p),
    )


def sum_results(
    results: torch.Tensor, pairs: Pairs, n: int = 0, places: torch.Tensor | None = None
) -> torch.Tensor:
    """`[M, n]`: each token's results, added in the order of its ids.

    Args:
        results: `[pairs, n]`, already weighted; with `places` `[rows, at least n]`.
        pairs: of the batch. Those without an expert have no results, and none are read.
        n: by default all columns.
        places: int32 `[pairs, 2]`, row of `results` or -1, and the bits of the pair's weight.
    """
    n, device = n or results.shape[1], results.get_device()
    m = pairs.count // pairs.top_k
    out = allocate(contiguous_memory((m, n), results.dtype), device)
    columns = _COLUMNS if places is None else _SORTED_COLUMNS
    blocks = -(-n // (_THREADS * columns))
    if places is None:
        arguments = KernelArguments(_Params, n=n, blocks=blocks)
    else:
        arguments = KernelArguments(_SortedParams, n=n, blocks=blocks, stride=results.shape[1])
        arguments.bind(places=places)
    arguments.params.pairs = pairs
    arguments.bind(results=results, out=out)
    kernel = compile_sum(results.dtype, places is not None, device)
    nvrtc.launch(kernel, m * blocks, _THREADS, (arguments.params,), overlap=True)
    return out


def compile_sum(dtype: torch.dtype, is_sorted: bool, device: int) -> nvrtc.Kernel:
    """The kernel for results in the order of pairs, or for sorted ones."""
    macros = (*dtype_macros(dtype), ("SORTED", int(is_sorted)))
    return nvrtc.load("moe/cuda/sum.cu", macros, (("moe_sum", 0),), device)["moe_sum"]
