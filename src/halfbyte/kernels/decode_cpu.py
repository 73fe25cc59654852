"""Launcher of the CPU decode kernel for packed NVFP4 pages (`decode_cpu.cpp`).

The kernel is built with the package where a C++ compiler is at hand, and reached through a plain C
interface. AVX-512, AVX2 or plain loops are chosen when it runs.
"""

import ctypes
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from halfbyte.kernels.parameters import REGION_FIELDS, region_fields
from halfbyte.layouts import PageLayout

LEVELS = {"portable": 0, "avx2": 1, "avx512": 2}
"""Instruction sets; each may use what is below it."""
MAX_HEAD_SIZE = 512


class _Params(ctypes.Structure):
    """`HalfbyteDecodeParams` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "pages", "query_start_loc", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "sinks", "out", "lse")),
        ("page_stride", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in REGION_FIELDS),
        *((name, ctypes.c_int32) for name in ("num_seqs", "max_pages", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_size", "head_size_v", "block_size")),
        *((name, ctypes.c_int32) for name in ("window", "threads")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "k_global", "v_global", "softcap")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The built kernel; None where the package was installed without a C++ compiler."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_decode_cpu{suffix}"
        if path.is_file():
            loaded = ctypes.CDLL(str(path))
            loaded.halfbyte_decode_nvfp4.argtypes = [ctypes.POINTER(_Params)]
            loaded.halfbyte_decode_nvfp4.restype = None
            loaded.halfbyte_cpu_level.argtypes = [ctypes.c_int]
            loaded.halfbyte_cpu_level.restype = ctypes.c_char_p
            return loaded
    return None


def set_level(name: str) -> str:
    """Use an instruction set of `LEVELS`, or the best below it; the one that will run."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("the CPU kernel was not built")
    chosen: bytes = loaded.halfbyte_cpu_level(LEVELS[name])
    return chosen.decode()


def unsupported_reason(layout: PageLayout) -> str | None:
    """Why the kernel cannot read a layout; None if it can."""
    if not (layout.k_dtype.is_nvfp4 and layout.v_dtype.is_nvfp4):
        return f"reads nvfp4, not K {layout.k_dtype} with V {layout.v_dtype}"
    if max(layout.head_size, layout.head_size_v) > MAX_HEAD_SIZE:
        return f"head sizes up to {MAX_HEAD_SIZE}"
    if layout.v_scale_layout != "linear":
        return f"linear V scales, not {layout.v_scale_layout}"
    return None


def decode_nvfp4(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """As `halfbyte.attention.paged_attention`, on arguments already checked, all on the CPU.

    Rows are bitwise the same whatever else is in the batch.
    """
    loaded = library()
    assert loaded is not None
    # Named, so that they outlive the call.
    q, tables = query.float().contiguous(), block_tables.contiguous()
    starts, lengths = query_start_loc.contiguous(), seq_lens.contiguous()
    float_sinks = None if sinks is None else sinks.float().contiguous()
    result = torch.empty(out.shape, dtype=torch.float32)
    params = _Params(
        query=q.data_ptr(),
        pages=pages.data_ptr(),
        query_start_loc=starts.data_ptr(),
        seq_lens=lengths.data_ptr(),
        block_tables=tables.data_ptr(),
        sinks=None if float_sinks is None else float_sinks.data_ptr(),
        out=result.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        page_stride=pages.stride(0),
        **region_fields(layout),
        num_seqs=tables.shape[0],
        max_pages=tables.shape[1],
        heads=query.shape[1],
        kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        head_size_v=layout.head_size_v,
        block_size=layout.block_size,
        window=sliding_window or 0,
        threads=torch.get_num_threads(),
        softmax_scale=scale,
        k_global=k_scale,
        v_global=v_scale,
        softcap=softcap or 0.0,
    )
    loaded.halfbyte_decode_nvfp4(ctypes.byref(params))
    out.copy_(result)
