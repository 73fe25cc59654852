"""Launcher of the split-KV decode kernel that reads packed pages.

Three launches, none of which waits for the host: a plan that cuts sequences into units of work so
that they just fill the GPU (`plan.cu`), the units (`decode.cu` or `decode_wide.cu`), which
end the rows that they have to themselves, and the merge of what several found (`merge.cu`).
All can be captured in a CUDA graph; lengths may change between replays. The plan depends on lengths
alone, so layers may share one: see `make_plan`.
"""

import ctypes
from dataclasses import dataclass

import torch

from halfbyte.attention.decode.variant import Variant, variant
from halfbyte.dispatch import capability_of_gpu
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import num_sms
from halfbyte.layouts import PageLayout

_BATCH_INVARIANT_SPAN = 512
"""Tokens per unit where results must not depend on the batch."""
_OVERHEAD_TOKENS = 64
"""To begin a piece takes about as long as so many tokens."""
_MAX_PARTIAL_BYTES = 2**31
_HEADER_INTS = 4
_TOKEN_INTS = 8
_UNIT_INTS = 12
MERGE_THREADS = {"merge_few": 128, "merge_several": 128, "merge_some": 128, "merge_many": 512}
_PIECE_INTS = 8


class _PlanParams(ctypes.Structure):
    """`PlanParams` of `plan.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "seq_lens", "query_start_loc")),
        *((name, ctypes.c_int) for name in ("num_seqs", "num_tokens", "group", "columns")),
        *((name, ctypes.c_int) for name in ("tile", "window")),
        *((name, ctypes.c_int) for name in ("max_units", "units_offset", "pieces_offset")),
        *((name, ctypes.c_int) for name in ("fixed_span", "overhead", "least_tiles")),
    )


class PlanView(ctypes.Structure):
    """`PlanView` of `work.cuh`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("units_offset", ctypes.c_int),
        ("pieces_offset", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """Units of work of a step, made on the GPU, and scratch for what they find."""

    variant: Variant
    data: torch.Tensor
    view: PlanView
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
    has_initial: bool = False,
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
        has_initial: rows have attended to something already, so that every sequence with queries
            needs a unit, one without tokens as well.
    """
    device = seq_lens.device
    num_seqs = seq_lens.shape[0]
    group = num_heads // layout.num_kv_heads
    capability = capability_of_gpu(device.index)
    way = variant(layout, group, num_tokens / num_seqs, batch_invariant, capability)
    assert way is not None, "the selection asks first"
    processors = num_sms(device.index)
    slots = way.ctas * processors
    max_units = max(1, slots * way.units_per_cta // layout.num_kv_heads)
    max_pieces = num_tokens * group // way.columns + num_seqs
    fixed_span = 0
    if batch_invariant:
        fixed_span = _BATCH_INVARIANT_SPAN // way.tile
        longest = -(-max_pages * layout.block_size // _BATCH_INVARIANT_SPAN)
        max_units = longest * max_pieces
    rows = (max_units + max_pieces) * layout.num_kv_heads * way.columns
    if rows * layout.head_size_v * 4 > _MAX_PARTIAL_BYTES:
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
        least_tiles=int(has_initial),
    )
    kernels = nvrtc.load("attention/decode/plan.cu", (), (("plan_work", 0),), device.index)
    nvrtc.launch(kernels["plan_work"], 1, 1024, [params])
    return Plan(
        variant=way,
        data=data,
        view=PlanView(data.data_ptr(), units_offset, pieces_offset),
        partial_out=torch.empty((rows, layout.head_size_v), dtype=torch.float32, device=device),
        partial_ml=torch.empty((rows, 2), dtype=torch.float32, device=device),
        slots=slots,
        merge=_merge_kernel(
            max_units / max_pieces,
            slice_ctas(num_tokens * num_heads, layout.head_size_v) <= 2 * processors,
            batch_invariant,
        ),
    )


def _merge_kernel(max_parts: float, find_room: bool, batch_invariant: bool) -> str:
    """The fastest way known to merge; the same for all where the order of sums counts.

    Args:
        max_parts: units per piece that there may be, which is about half of the parts of a row.
        find_room: whether CTAs of many registers find room on the GPU all at once.
    """
    if batch_invariant:
        return "merge_some"
    if max_parts < 12:
        return "merge_several" if max_parts >= 3 and find_room else "merge_few"
    return "merge_some" if max_parts < 128 else "merge_many"


def slice_ctas(rows: int, head_size_v: int) -> int:
    """CTAs of the kernels that give a thread four dims of a row."""
    return -(-rows * head_size_v // (4 * 128))


def _rounded_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
