"""Fills tokens that rings lack, such as after a prefix cache hit, from the pages."""

import torch

from halfbyte.attention.prefill.key_ranges import KeyRanges, unknown_to_unpack
from halfbyte.dispatch import is_installed
from halfbyte.kvcache.recent_step import LayerPages, RecentStep
from halfbyte.layouts import PageLayout

Rings = tuple[torch.Tensor, torch.Tensor]


def fill_rings(
    step: RecentStep, rings: Rings, packed: LayerPages, window: int | None = None
) -> None:
    """`step.fill`; on a GPU in one launch, without a sync.

    Args:
        step: of the batch.
        rings: K and V of a layer, `[entries, kv_heads, ring, D]` and `[entries, kv_heads, ring,
            Dv]`, contiguous.
        packed: of the layer, with all tokens before the step's.
        window: of the layer's attention.
    """
    if not step.missing:
        return
    if rings[0].is_cuda and _can_unpack(packed.layout, rings[0].dtype):
        unpack_into_rings(step, rings, packed, window)
    else:
        step.fill(rings, packed, window)


def _can_unpack(layout: PageLayout, dtype: torch.dtype) -> bool:
    known = unknown_to_unpack(layout) is None
    return known and dtype != torch.float64 and is_installed("triton")


def unpack_into_rings(
    step: RecentStep, rings: Rings, packed: LayerPages, window: int | None
) -> None:
    """`fill_rings` by the kernel that unpacks pages for prefill."""
    # Here, because the import needs Triton.
    from halfbyte.attention.prefill.unpack import unpack_into

    ranges = step.missing_ranges(window, packed.pages.device)
    _, kv_heads, ring, _ = rings[0].shape
    # Entry 0 as [ring, kv_heads, D]. Its row stride is D, so entry e starts at row
    # e * kv_heads * ring.
    k_out, v_out = (x[0].transpose(0, 1) for x in rings)
    unpack_into(
        k_out,
        v_out,
        packed,
        KeyRanges(
            sequences=ranges.numbers,
            num_rows=ring,
            max_keys=ranges.max_tokens,
            begins=ranges.begins,
            ends=ranges.ends,
            rows=ranges.entries * (kv_heads * ring),
            ring=ring,
        ),
    )
