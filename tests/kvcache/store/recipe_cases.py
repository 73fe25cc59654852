"""Stores of K with a recipe: inputs, and the expected pages."""

from collections.abc import Callable
from typing import Any

import torch

from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.transform import MARK
from halfbyte.layouts import PageLayout
from kvcache.store.store_cases import nasty_values, reference_store
from kvcache.transforms import make_transform, on

RECIPE_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"rotate": False},
    {"center": False},
    {"first_tokens": 0},
    {"head_size": 128, "heads": 5},
    {"head_size": 96, "head_size_v": 32},
    {"head_size": 256, "heads": 1, "head_size_v": 16},
)
WEIGHTS_ALONE: tuple[dict[str, Any], ...] = (
    {"weighted": True},
    {"weighted": True, "head_size": 96, "head_size_v": 32, "heads": 3},
)
"""Options of `make_transform` as for `balanced`."""
WEIGHTED_OPTIONS: tuple[dict[str, Any], ...] = (
    {"feedback": True, "weighted": True},
    {"feedback": True, "weighted": True, "center": False, "rotate": False, "first_tokens": 0},
    {"feedback": True, "weighted": True, "head_size": 96, "head_size_v": 32, "heads": 3},
    {"feedback": True, "weighted": True, "head_size": 256, "heads": 1, "head_size_v": 16},
    {"feedback": True, "weighted": True, "head_size": 16, "heads": 5, "head_size_v": 128},
    {"feedback": True},
    *WEIGHTS_ALONE,
)
"""Options with weighted errors."""


def assert_stored_as_by_the_reference(
    store: Callable[..., None],
    options: dict[str, Any],
    input_dtype: torch.dtype,
    device: str = "cpu",
    count: int = 300,
) -> None:
    """The reference's bytes, the first token's mark, and tokens that are also kept in rings.

    Args:
        store: as `reshape_and_cache`.
        options: of `make_transform`.
        count: tokens, of two sequences of as many.
    """
    transform = make_transform(**{"segments": 20, "dtype": input_dtype, **options})
    heads, head_size = options.get("heads", 2), options.get("head_size", 64)
    head_size_v = options.get("head_size_v", head_size)
    layout = PageLayout("nvfp4_4over6", "nvfp4", head_size, head_size_v, heads, 16)
    key = 4 * nasty_values((count, heads, head_size)).clamp(-1e3, 1e3)
    value = nasty_values((count, heads, head_size_v), seed=1)
    slots = torch.randperm(320)[:count]
    slots[7] = -1
    positions = torch.arange(count)
    positions[7] = -(10**9)  # of padding, which may be anything
    second = count // 2
    positions[second:] -= second
    if transform.first_keys is not None and transform.first_values is not None:
        key[second] = transform.first_keys[1].float()
        value[second] = transform.first_values[1].float()
        key[0] = transform.first_keys[0].float() * (1 + 2.0**-5)  # too far away
    rows = torch.arange(count - 30, count, 2)
    owners, ring_slots = torch.arange(len(rows)) % 3, torch.arange(len(rows)) + 2
    pages, rings = [], []
    for write, where in ((reference_store, "cpu"), (store, device)):
        rings_of_all = [
            torch.zeros(3, heads, 20, size, dtype=input_dtype, device=where)
            for size in (head_size, head_size_v)
        ]
        places = (x.to(where) for x in (rows, owners, ring_slots))
        page = torch.zeros(20, layout.page_bytes, dtype=torch.uint8, device=where)
        write(
            key.to(where, input_dtype),
            value.to(where, input_dtype),
            page,
            slots.to(where),
            layout,
            0.02,
            0.01,
            transform=on(transform, where),
            positions=positions.to(where),
            recent=RingSlots(*rings_of_all, *places),
        )
        pages.append(page.cpu())
        rings.append([ring.cpu() for ring in rings_of_all])
    assert torch.equal(*pages)
    for ring, expected, x in zip(rings[1], rings[0], (key, value), strict=True):
        torch.testing.assert_close(ring, expected, rtol=0, atol=0, equal_nan=True)
        kept = ring[owners, :, ring_slots]
        torch.testing.assert_close(kept, x[rows].to(input_dtype), rtol=0, atol=0, equal_nan=True)
    views = layout.views(pages[1])
    assert views.k_scale is not None
    page_of, offset = slots[second] // 16, slots[second] % 16
    marked = views.k_scale[page_of, offset, :, 0] == MARK
    assert marked.all() == (transform.first_keys is not None)
    assert (views.k_scale == MARK).sum() == heads * (transform.first_keys is not None)
