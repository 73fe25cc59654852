"""Launcher of the split-KV decode kernel that reads packed pages.

Three launches, none of which waits for the host: a plan that cuts sequences into units of work so
that they just fill the GPU (`decode_plan.cu`), the units (`decode.cu` or `decode_wide.cu`), which
end the rows that they have to themselves, and the merge of what several found (`decode_merge.cu`).
All can be captured in a CUDA graph; lengths may change between replays. The plan depends on lengths
alone, so layers may share one: see `make_plan`.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from halfbyte.dispatch import capability_of_gpu
from halfbyte.kernels import nvrtc
from halfbyte.kernels.decode_variant import WARPS, Variant, macros, variant
from halfbyte.kernels.devices import current_device, multiprocessors
from halfbyte.kernels.tensor_maps import TensorMap, tensor_map_of_pages
from halfbyte.layouts import PageLayout, page_stride

_BATCH_INVARIANT_SPAN = 512
"""Tokens per unit where results must not depend on the batch."""
_OVERHEAD_TOKENS = 64
"""To begin a piece takes about as long as so many tokens."""
_MOST_PARTIAL_BYTES = 2**31
_HEADER_INTS = 4
_TOKEN_INTS = 8
_UNIT_INTS = 12
_MERGE_THREADS = {"merge_few": 128, "merge_several": 128, "merge_some": 128, "merge_many": 512}
_PIECE_INTS = 8


class _PlanParams(ctypes.Structure):
    """`PlanParams` of `decode_plan.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "seq_lens", "query_start_loc")),
        *((name, ctypes.c_int) for name in ("num_seqs", "num_tokens", "group", "columns")),
        *((name, ctypes.c_int) for name in ("tile", "window")),
        *((name, ctypes.c_int) for name in ("max_units", "units_offset", "pieces_offset")),
        *((name, ctypes.c_int) for name in ("fixed_span", "overhead")),
    )


class _PlanView(ctypes.Structure):
    """`PlanView` of `decode_work.cuh`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("units_offset", ctypes.c_int),
        ("pieces_offset", ctypes.c_int),
    )


class _Output(ctypes.Structure):
    """`Output` of `decode_output.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "lse", "sinks")),
        ("stride_token", ctypes.c_uint64),
        ("stride_head", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    """`Params` of `decode_loader.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "pages", "partial_out", "partial_ml")),
        ("plan", _PlanView),
        *((name, ctypes.c_void_p) for name in ("block_tables", "k_scale", "v_scale")),
        ("query_stride_token", ctypes.c_uint64),
        ("query_stride_head", ctypes.c_uint64),
        ("page_stride", ctypes.c_uint32),
        ("max_pages", ctypes.c_int),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int),
        ("output", _Output),
    )


class _MergeParams(ctypes.Structure):
    """`MergeParams` of `decode_merge.cu`."""

    _fields_ = (
        ("partial_out", ctypes.c_void_p),
        ("partial_ml", ctypes.c_void_p),
        ("plan", _PlanView),
        ("output", _Output),
        ("num_tokens", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """Units of work of a step, made on the GPU, and scratch for what they find."""

    variant: Variant
    data: torch.Tensor
    view: _PlanView
    partial_out: torch.Tensor
    partial_ml: torch.Tensor
    slots: int
    """CTAs that run at once."""
    merge: str
    """Which kernel joins the parts: their number per row decides."""


def make_plan(
    layout: PageLayout,
    num_heads: int,
    num_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_pages: int,
    sliding_window: int | None,
    batch_invariant: bool,
) -> Plan:
    """Cut a step's attention into units that just fill the GPU.

    The plan serves every call with the same layout, heads, window and lengths, one after the other
    on one stream; calls on several streams at once need one each, for they share its scratch.

    Args:
        layout, query_start_loc, seq_lens, sliding_window, batch_invariant: as for
            `halfbyte.attention.paged_attention`; tensors contiguous, on the GPU.
        num_heads: of the query.
        num_tokens: of the query, in all. Those past the last sequence's pad a captured graph; their
            rows become 0.
        max_pages: that a sequence can have.
    """
    device = seq_lens.device
    num_seqs = seq_lens.shape[0]
    group = num_heads // layout.num_kv_heads
    capability = capability_of_gpu(device.index)
    way = variant(layout, group, num_tokens / num_seqs, batch_invariant, capability)
    assert way is not None, "the selection asks first"
    processors = multiprocessors(device.index)
    slots = way.ctas * processors
    max_units = max(1, slots * way.units_per_cta // layout.num_kv_heads)
    max_pieces = num_tokens * group // way.columns + num_seqs
    fixed_span = 0
    if batch_invariant:
        fixed_span = _BATCH_INVARIANT_SPAN // way.tile
        longest = -(-max_pages * layout.block_size // _BATCH_INVARIANT_SPAN)
        max_units = longest * max_pieces
    rows = (max_units + max_pieces) * layout.num_kv_heads * way.columns
    if rows * layout.head_size_v * 4 > _MOST_PARTIAL_BYTES:
        raise ValueError(
            f"batch_invariant: {num_seqs} sequences of up to {max_pages} pages need "
            f"{rows * layout.head_size_v >> 18} MiB for results of parts; ask for backend 'triton'"
        )
    units_offset = _rounded_up(_HEADER_INTS + _TOKEN_INTS * num_tokens, 8)
    pieces_offset = _rounded_up(units_offset + _UNIT_INTS * max_units, 8)
    data = torch.empty(pieces_offset + _PIECE_INTS * max_pieces, dtype=torch.int32, device=device)
    params = _PlanParams(
        plan=data.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        group=group,
        columns=way.columns,
        tile=way.tile,
        window=sliding_window or 0,
        max_units=max_units,
        units_offset=units_offset,
        pieces_offset=pieces_offset,
        fixed_span=fixed_span,
        overhead=max(1, _OVERHEAD_TOKENS // way.tile),
    )
    kernels = nvrtc.load("decode_plan", (), (("plan_work", 0),), device.index)
    nvrtc.launch(kernels["plan_work"], 1, 1024, [params])
    return Plan(
        variant=way,
        data=data,
        view=_PlanView(data.data_ptr(), units_offset, pieces_offset),
        partial_out=torch.empty((rows, layout.head_size_v), dtype=torch.float32, device=device),
        partial_ml=torch.empty((rows, 2), dtype=torch.float32, device=device),
        slots=slots,
        merge=_merge_kernel(
            max_units / max_pieces,
            _slice_ctas(num_tokens * num_heads, layout.head_size_v) <= 2 * processors,
            batch_invariant,
        ),
    )


def decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """As `halfbyte.attention.paged_attention`, on arguments already checked, all on one GPU.

    Args:
        k_scale, v_scale: float32 tensors of one element.
        sinks: float32 `[heads]`, contiguous.
        plan: `make_plan` of the same work.

    Raises:
        ValueError: pages that are not aligned to 16 bytes, or 4 GiB apart.
    """
    num_tokens, num_heads, _ = query.shape
    stride = page_stride(pages)
    if pages.data_ptr() % 16 or stride % 16 or stride >= 2**32:
        raise ValueError(
            f"pages: the kernel copies 16 bytes at a time; the base {pages.data_ptr():#x} and the "
            f"stride {stride} (below 2^32) must be multiples of 16"
        )
    if query.stride(2) != 1 or any(x % 8 for x in (query.data_ptr() // 2, *query.stride()[:2])):
        query = query.clone(memory_format=torch.contiguous_format)
    block_tables = block_tables.contiguous()
    kernels = _kernels(
        layout,
        num_heads // layout.num_kv_heads,
        query.dtype,
        bool(softcap),
        plan.variant,
        query.device.index,
    )
    params = _Params(
        query=query.data_ptr(),
        pages=pages.data_ptr(),
        partial_out=plan.partial_out.data_ptr(),
        partial_ml=plan.partial_ml.data_ptr(),
        plan=plan.view,
        block_tables=block_tables.data_ptr(),
        k_scale=k_scale.data_ptr(),
        v_scale=v_scale.data_ptr(),
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        page_stride=stride,
        max_pages=block_tables.shape[1],
        softmax_scale=scale,
        softcap=softcap or 0.0,
        window=sliding_window or 0,
        output=_Output(
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.stride(0),
            out.stride(1),
        ),
    )
    arguments: list[nvrtc.Argument] = [params]
    if plan.variant.whole_pages:
        arguments.append(_pages_map(pages if len(pages) else plan.data[None], stride, layout))
    nvrtc.launch(kernels["decode"], plan.slots, 32 * WARPS, arguments)
    merge = _MergeParams(
        partial_out=plan.partial_out.data_ptr(),
        partial_ml=plan.partial_ml.data_ptr(),
        plan=plan.view,
        output=params.output,
        num_tokens=num_tokens,
    )
    rows = num_tokens * num_heads
    overlap = capability_of_gpu(query.device.index) >= 90
    if plan.merge in ("merge_few", "merge_several"):
        grid = _slice_ctas(rows, layout.head_size_v)
    else:
        grid = rows * (layout.head_size_v // 32)
    nvrtc.launch(kernels[plan.merge], grid, _MERGE_THREADS[plan.merge], [merge], overlap=overlap)


@lru_cache(maxsize=256)
def _kernels(
    layout: PageLayout, group: int, dtype: torch.dtype, softcap: bool, way: Variant, device: int
) -> dict[str, nvrtc.Kernel]:
    options = tuple(macros(layout, group, dtype, softcap, way).items())
    entry = ("decode", way.cta_bytes(layout))
    return {
        **nvrtc.load(way.source, options, (entry,), device),
        **nvrtc.load("decode_merge", options, tuple((name, 0) for name in _MERGE_THREADS), device),
    }


def _pages_map(pages: torch.Tensor, stride: int, layout: PageLayout) -> TensorMap:
    """Pages of one KV head, all of whose rows are as wide as K's.

    Args:
        pages: at least one; where there are none, any memory, for nothing is read.
        stride: bytes from page to page; 0 of a single one.
    """
    width = layout.k_dtype.data_bytes(layout.head_size)
    rows = layout.page_bytes // width
    with current_device(pages.get_device()):
        return tensor_map_of_pages(
            pages.data_ptr(), len(pages), rows, width, stride or rows * width
        )


def _merge_kernel(most_parts: float, find_room: bool, batch_invariant: bool) -> str:
    """The fastest way known to merge; the same for all where the order of sums counts.

    Args:
        most_parts: units per piece that there may be, which is about half of the parts of a row.
        find_room: whether CTAs of many registers find room on the GPU all at once.
    """
    if batch_invariant:
        return "merge_some"
    if most_parts < 12:
        return "merge_several" if most_parts >= 3 and find_room else "merge_few"
    return "merge_some" if most_parts < 128 else "merge_many"


def _slice_ctas(rows: int, head_size_v: int) -> int:
    """CTAs of the kernels that give a thread four dims of a row."""
    return -(-rows * head_size_v // (4 * 128))


def _rounded_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
