"""Launcher of the split-KV decode kernel that reads packed pages.

Three launches, without a host sync: `plan.cu` splits the sequences into units of work that just
fill the GPU; `decode.cu` or `decode_wgmma.cu` computes the units and writes the output of rows that
a single unit covers; `merge.cu` merges the partial results of all other rows.
All can be captured in a CUDA graph; lengths may change between replays. The plan depends only on
lengths, so layers can share one: see `make_plan`.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.decode.recipe import NO_RECIPE, RecipeVariant
from halfbyte.attention.decode.variant import DecodeVariant, choose_variant, stage_bytes
from halfbyte.dispatch import compute_capability_of_gpu
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import num_sms
from halfbyte.layouts import PageLayout

_BATCH_INVARIANT_SPAN = 512
"""Tokens per unit where results must not depend on the batch."""
_OVERHEAD_TOKENS = 64
"""Cost of starting a work item, in tokens."""
_MAX_PARTIAL_BYTES = 2**31
_HEADER_INTS = 4
_TOKEN_INTS = 8
_UNIT_INTS = 12
MERGE_THREADS = {
    "merge_8": 128,
    "merge_32": 128,
    "merge_128": 128,
    "merge_128_ahead": 128,
    "merge_512": 512,
}
_ITEM_INTS = 8


class _PlanParams(ctypes.Structure):
    """`PlanParams` of `plan.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "seq_lens", "query_start_loc")),
        *((name, ctypes.c_int) for name in ("num_seqs", "num_tokens", "group", "columns")),
        *((name, ctypes.c_int) for name in ("tile", "window")),
        *((name, ctypes.c_int) for name in ("max_units", "units_offset", "items_offset")),
        *((name, ctypes.c_int) for name in ("fixed_span", "overhead", "recent", "min_tiles")),
    )


class PlanView(ctypes.Structure):
    """`PlanView` of `work.cuh`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("units_offset", ctypes.c_int),
        ("items_offset", ctypes.c_int),
    )


@dataclass(frozen=True)
class DecodePlan:
    """Units of work of a step, made on the GPU, and scratch for their partial results."""

    variant: DecodeVariant
    data: torch.Tensor
    view: PlanView
    partial_out: torch.Tensor
    partial_ml: torch.Tensor
    slots: int
    """CTAs resident at once."""
    merge: str
    """Name of the merge kernel, chosen by the number of partial results per row."""


class _Limits(NamedTuple):
    """Bounds on a step's work, from shapes alone, so that planning does not sync the GPU."""

    variant: DecodeVariant
    slots: int
    """CTAs resident at once."""
    max_units: int
    max_items: int
    fixed_span: int
    """Tiles per unit if batch-invariant, else 0."""
    rows: int
    """Of partial results."""


class _PlanKey(NamedTuple):
    """What a plan depends on, beside the step's lengths."""

    layout: PageLayout
    num_heads: int
    num_tokens: int
    max_pages: int
    sliding_window: int | None
    batch_invariant: bool
    recipe: RecipeVariant
    device: torch.device


def plan_of(inputs: AttentionInputs, recipe: RecipeVariant) -> DecodePlan:
    """`make_plan`, cached for all layers that share `inputs.plans`."""
    num_tokens, num_heads, _ = inputs.query.shape
    key = _PlanKey(
        layout=inputs.layout,
        num_heads=num_heads,
        num_tokens=num_tokens,
        max_pages=inputs.block_tables.shape[1],
        sliding_window=inputs.sliding_window,
        batch_invariant=inputs.batch_invariant,
        recipe=recipe,
        device=inputs.query.device,
    )
    return inputs.plans.get(key, lambda: make_plan(inputs, recipe))


def make_plan(inputs: AttentionInputs, recipe: RecipeVariant = NO_RECIPE) -> DecodePlan:
    """Split a step's attention into units that just fill the GPU.

    The plan serves every call with the same layout, heads, window and lengths, in order on one
    stream. Concurrent streams need a plan each, because calls share its scratch.

    Args:
        inputs: of `paged_attention`, checked, on one GPU. Query tokens after the last sequence's
            pad a captured graph; their rows become 0.
        recipe: with recent tokens every sequence with queries needs a unit, even if the pages have
            none of its tokens.

    Raises:
        ValueError: batch-invariant work whose partial results would take too much memory.
    """
    layout, device = inputs.layout, inputs.seq_lens.device
    num_tokens, num_heads, _ = inputs.query.shape
    limits = _limits(inputs, recipe)
    variant = limits.variant
    recent_bytes = 2 * recipe.recent * (layout.head_size + layout.head_size_v)
    recent_tiles = recent_bytes / stage_bytes(layout, variant.tile)
    units_offset = _rounded_up(_HEADER_INTS + _TOKEN_INTS * num_tokens, 8)
    items_offset = _rounded_up(units_offset + _UNIT_INTS * limits.max_units, 8)
    size = items_offset + _ITEM_INTS * limits.max_items
    data = torch.empty(size, dtype=torch.int32, device=device)
    # Assigned to names, so that they outlive the launch.
    seq_lens, query_start_loc = inputs.seq_lens.contiguous(), inputs.query_start_loc.contiguous()
    params = _PlanParams(
        plan=data.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        num_seqs=seq_lens.shape[0],
        num_tokens=num_tokens,
        group=num_heads // layout.num_kv_heads,
        columns=variant.columns,
        tile=variant.tile,
        window=inputs.sliding_window or 0,
        max_units=limits.max_units,
        units_offset=units_offset,
        items_offset=items_offset,
        fixed_span=limits.fixed_span,
        overhead=max(1, _OVERHEAD_TOKENS // variant.tile),
        recent=round(recent_tiles),
        min_tiles=int(recipe.recent > 0),
    )
    kernels = nvrtc.load("attention/decode/plan.cu", (), (("plan_work", 0),), device.index)
    nvrtc.launch(kernels["plan_work"], 1, 1024, [params])
    merge_ctas = slice_ctas(num_tokens * num_heads, layout.head_size_v)
    partial_out = (limits.rows, layout.head_size_v)
    return DecodePlan(
        variant=variant,
        data=data,
        view=PlanView(data.data_ptr(), units_offset, items_offset),
        partial_out=torch.empty(partial_out, dtype=torch.float32, device=device),
        partial_ml=torch.empty((limits.rows, 2), dtype=torch.float32, device=device),
        slots=limits.slots,
        merge=_merge_kernel(
            limits.max_units / limits.max_items,
            merge_ctas <= 2 * num_sms(device.index),
            inputs.batch_invariant,
            recipe.recent > 0,
        ),
    )


def _limits(inputs: AttentionInputs, recipe: RecipeVariant) -> _Limits:
    layout, index = inputs.layout, inputs.seq_lens.device.index
    num_tokens, num_heads, _ = inputs.query.shape
    num_seqs, max_pages = inputs.block_tables.shape
    group = num_heads // layout.num_kv_heads
    compute_capability = compute_capability_of_gpu(index)
    variant = choose_variant(
        layout, group, num_tokens / num_seqs, inputs.batch_invariant, compute_capability, recipe
    )
    assert variant is not None, "the selection asks first"
    slots = variant.ctas * num_sms(index)
    max_units = max(1, slots * variant.units_per_cta // layout.num_kv_heads)
    max_items = num_tokens * group // variant.columns + num_seqs
    fixed_span = 0
    if inputs.batch_invariant:
        fixed_span = _BATCH_INVARIANT_SPAN // variant.tile
        # Recent tokens need a unit even if the pages have none.
        longest = max(1, -(-max_pages * layout.block_size // _BATCH_INVARIANT_SPAN))
        max_units = longest * max_items
    rows = (max_units + max_items) * layout.num_kv_heads * variant.columns
    if rows * layout.head_size_v * 4 > _MAX_PARTIAL_BYTES:
        raise ValueError(
            f"batch_invariant: {num_seqs} sequences of up to {max_pages} pages need "
            f"{rows * layout.head_size_v >> 18} MiB for results of parts; ask for backend 'triton'"
        )
    return _Limits(variant, slots, max_units, max_items, fixed_span, rows)


def _merge_kernel(max_parts: float, ctas_fit: bool, batch_invariant: bool, recent: bool) -> str:
    """The fastest known merge kernel; a fixed one if batch-invariant (fixed order of sums).

    Args:
        max_parts: max units per work item; a row has up to about twice as many partial results.
        ctas_fit: whether all CTAs of the kernel with many registers are resident at once.
        recent: recent tokens have positions, too, so that 128 units of one sequence become 129.
    """
    if batch_invariant:
        return "merge_128"
    if max_parts < 12:
        return "merge_32" if max_parts >= 3 and ctas_fit else "merge_8"
    if max_parts >= 128:
        return "merge_512"
    return "merge_128_ahead" if recent and max_parts > 64 else "merge_128"


def slice_ctas(rows: int, head_size_v: int) -> int:
    """Grid size of the merge kernels in which a thread has four dims of a row."""
    return -(-rows * head_size_v // (4 * 128))


def _rounded_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
