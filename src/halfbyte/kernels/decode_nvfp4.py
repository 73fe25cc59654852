"""Launcher of the split-KV decode kernel for packed NVFP4 pages (`decode_nvfp4.cu`).

Three launches, none of which waits for the host: a plan that cuts sequences into chunks so that
they just fill the GPU, the chunks, and their merge. All can be captured in a CUDA graph; lengths
may change between replays.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from halfbyte.kernels import nvrtc
from halfbyte.kernels.parameters import REGION_FIELDS, region_fields
from halfbyte.layouts import PageLayout

_WARPS = 8
_TILE = 32
_STAGES = 3
_BATCH_INVARIANT_CHUNK = 16
"""Tiles per chunk where results must not depend on the batch: 512 tokens."""
_DTYPE_MACROS = {
    torch.bfloat16: "Q_BF16",
    torch.float16: "Q_FP16",
}
"""Queries enter the matmul as fp16 times a power of two: exact for these two, not for float32."""


class _Params(ctypes.Structure):
    """`Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "pages", "partial_out", "partial_ml")),
        *((name, ctypes.c_void_p) for name in ("plan", "seq_lens", "query_start_loc")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "k_global", "v_global")),
        ("page_stride", ctypes.c_uint64),
        ("query_stride_token", ctypes.c_uint64),
        ("query_stride_head", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in REGION_FIELDS),
        *((name, ctypes.c_int) for name in ("num_seqs", "max_pages", "kv_heads", "group")),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int),
    )


@dataclass(frozen=True)
class _Workspace:
    """Scratch of one call; kept alive by whoever captured it."""

    plan: torch.Tensor
    partial_out: torch.Tensor
    partial_ml: torch.Tensor


def unsupported_reason(layout: PageLayout, query_dtype: torch.dtype) -> str | None:
    """Why the kernel cannot read a layout; None if it can."""
    if not (layout.k_dtype.is_nvfp4 and layout.v_dtype.is_nvfp4):
        return f"reads nvfp4, not K {layout.k_dtype} with V {layout.v_dtype}"
    if {layout.head_size, layout.head_size_v} - {64, 128, 256}:
        return f"head sizes 64, 128 and 256, not {layout.head_size} and {layout.head_size_v}"
    if layout.block_size % 16:
        return f"pages of a multiple of 16 tokens, not {layout.block_size}"
    if layout.v_scale_layout != "linear":
        return f"linear V scales, not {layout.v_scale_layout}"
    if query_dtype not in _DTYPE_MACROS:
        return f"query in bfloat16 or float16, not {query_dtype}"
    return None


def decode_nvfp4(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """As `halfbyte.attention.paged_attention`, on arguments already checked, all on one GPU.

    Args:
        k_scale, v_scale: float32 tensors of one element.
        sinks: float32 `[heads]`, contiguous.
    """
    num_tokens, num_heads, _ = query.shape
    num_seqs, max_pages = block_tables.shape
    if num_tokens == 0:
        return
    if pages.data_ptr() % 16 or pages.stride(0) % 16:
        raise ValueError(
            f"pages: the kernel copies 16 bytes at a time; the base {pages.data_ptr():#x} and the "
            f"stride {pages.stride(0)} must be multiples of 16"
        )
    query = query if query.stride(2) == 1 else query.contiguous()
    block_tables = block_tables.contiguous()
    query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
    group = num_heads // layout.num_kv_heads
    # Units of four columns, where they are enough for (mostly) one query token per sequence.
    duplicate = group <= 4 and num_tokens <= num_seqs and not batch_invariant
    kernels = _kernels(layout, query.dtype, bool(softcap), duplicate, query.device.index)
    slots = _resident_ctas(query.device.index)
    max_units = max(1, slots * _WARPS // layout.num_kv_heads)
    max_rows = max_units + 2 * num_tokens
    chunk = 0
    if batch_invariant:
        chunk = _BATCH_INVARIANT_CHUNK
        longest = -(-max_pages * layout.block_size // (_TILE * chunk))
        max_rows = longest * num_tokens
    workspace = _Workspace(
        query.new_empty(2 + 2 * num_seqs + 1, dtype=torch.int32),
        query.new_empty((max_rows, num_heads, layout.head_size_v), dtype=torch.float32),
        query.new_empty((max_rows, num_heads, 2), dtype=torch.float32),
    )
    params = _Params(
        query=query.data_ptr(),
        pages=pages.data_ptr(),
        partial_out=workspace.partial_out.data_ptr(),
        partial_ml=workspace.partial_ml.data_ptr(),
        plan=workspace.plan.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        block_tables=block_tables.data_ptr(),
        k_global=k_scale.data_ptr(),
        v_global=v_scale.data_ptr(),
        page_stride=pages.stride(0),
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        **region_fields(layout),
        num_seqs=num_seqs,
        max_pages=max_pages,
        kv_heads=layout.num_kv_heads,
        group=group,
        softmax_scale=scale,
        softcap=softcap or 0.0,
        window=sliding_window or 0,
    )
    int32 = ctypes.c_int
    nvrtc.launch(
        kernels["plan_chunks"],
        1,
        1024,
        [
            params,
            ctypes.c_void_p(workspace.plan.data_ptr()),
            int32(max_units),
            int32(max_rows),
            int32(chunk),
        ],
    )
    nvrtc.launch(kernels["decode"], slots, 32 * _WARPS, [params])
    rows = num_tokens * num_heads
    # Few rows have many chunks each: all warps of a CTA share one.
    spread = _WARPS if rows < 4 * slots or batch_invariant else 1
    nvrtc.launch(
        kernels["merge"],
        -(-rows * spread // _WARPS),
        32 * _WARPS,
        [
            params,
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(None if lse is None else lse.data_ptr()),
            ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
            ctypes.c_uint64(out.stride(0)),
            ctypes.c_uint64(out.stride(1)),
            int32(num_tokens),
            int32(spread),
        ],
    )


def macros(
    layout: PageLayout, dtype: torch.dtype, softcap: bool, duplicate: bool
) -> dict[str, int | None]:
    """Macros that the source is compiled with for some work."""
    return {
        "HEAD_SIZE": layout.head_size,
        "HEAD_SIZE_V": layout.head_size_v,
        "BLOCK_SIZE": layout.block_size,
        "SOFTCAP": int(softcap),
        "DUPLICATE": int(duplicate),
        # HND keeps a head's tokens side by side, so that every copy is one of 16 bytes.
        "HND": int(layout.order == "HND"),
        _DTYPE_MACROS[dtype]: None,
    }


def shared_bytes(layout: PageLayout) -> int:
    """Dynamic shared memory of a CTA."""
    row = (layout.head_size + layout.head_size_v) * 9 // 16
    return _WARPS * _STAGES * _TILE * row


@lru_cache(maxsize=256)
def _kernels(
    layout: PageLayout, dtype: torch.dtype, softcap: bool, duplicate: bool, device: int
) -> dict[str, nvrtc.Kernel]:
    functions = (("plan_chunks", 0), ("decode", shared_bytes(layout)), ("merge", 0))
    return nvrtc.load(
        "decode_nvfp4", tuple(macros(layout, dtype, softcap, duplicate).items()), functions, device
    )


@lru_cache(maxsize=8)
def _resident_ctas(device: int) -> int:
    """CTAs that run at once: two on every multiprocessor, which the kernel is built for."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
