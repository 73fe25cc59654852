"""K and V rounded by weighted error: inputs of a store, and the reference's pages of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from halfbyte.layouts import PageLayout
from kvcache.store.store_cases import nasty_values, reference_store
from kvcache.transforms import SEGMENT, make_transform, on

Scale = float | torch.Tensor


class WeightedCase(NamedTuple):
    """A layout and what is stored in it; `options` are of `make_transform`."""

    layout: PageLayout
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    k_scale: Scale = 0.013
    v_scale: Scale = 0.004


BOTH: dict[str, Any] = {"feedback": True, "weighted": True}
LAYOUTS = {
    "128": PageLayout("nvfp4_4over6", "nvfp4_4over6", 128, None, 2, 16),
    "64 NHD": PageLayout("nvfp4_4over6", "nvfp4_4over6", 64, None, 3, 16, "NHD"),
    "amax6": PageLayout("nvfp4", "nvfp4", 64, None, 2, 8),
    "48 and 32": PageLayout("nvfp4_4over6", "nvfp4", 48, 32, 2, 16),
    "sm100": PageLayout("nvfp4_4over6", "nvfp4_4over6", 64, 128, 2, 16, v_scale_layout="sm100"),
    "V in fp8": PageLayout("nvfp4_4over6", "fp8_e4m3", 64, 40, 2, 16),
    "V in fp8, 64": PageLayout("nvfp4", "fp8_e4m3", 64, None, 2, 16, "NHD"),
    "V in e5m2, 32": PageLayout("nvfp4_4over6", "fp8_e5m2", 128, 32, 1, 16),
    "256": PageLayout("nvfp4_4over6", "nvfp4_4over6", 256, None, 1, 16),
}
SMALL = {
    "both": WeightedCase(PageLayout("nvfp4_4over6", "nvfp4_4over6", 48, 32, 2, 16), BOTH),
    "amax6, V in fp8": WeightedCase(PageLayout("nvfp4", "fp8_e4m3", 32, 8, 1, 8), BOTH),
    "feedback alone": WeightedCase(
        PageLayout("nvfp4_4over6", "nvfp4_4over6", 32, None, 1, 16, "NHD"), {"feedback": True}
    ),
    "weights alone, one block": WeightedCase(
        PageLayout("nvfp4_4over6", "nvfp4_4over6", 16, 32, 1, 16), {"weighted": True}
    ),
    "weights alone, V in fp8": WeightedCase(
        PageLayout("nvfp4", "fp8_e4m3", 48, 8, 2, 8), {"weighted": True}
    ),
    "weights alone, broken scale": WeightedCase(
        PageLayout("nvfp4_4over6", "nvfp4_4over6", 32, None, 1, 16),
        {"weighted": True},
        torch.tensor(-0.01),
    ),
    "broken scale": WeightedCase(
        PageLayout("nvfp4_4over6", "nvfp4_4over6", 32, None, 1, 16), BOTH, torch.tensor(-0.01)
    ),
}
"""Fewer cases, for Triton's interpreter, which is slow."""
CASES: dict[str, WeightedCase] = {
    **{name: WeightedCase(layout, BOTH) for name, layout in LAYOUTS.items()},
    "weights alone": WeightedCase(LAYOUTS["128"], {"weighted": True}),
    "weights alone, 64 NHD": WeightedCase(LAYOUTS["64 NHD"], {"weighted": True}),
    "weights alone, scale 1e-20": WeightedCase(LAYOUTS["64 NHD"], {"weighted": True}, 1e-20, 1e-20),
    "feedback alone": WeightedCase(LAYOUTS["64 NHD"], {"feedback": True}),
    "feedback, amax6": WeightedCase(LAYOUTS["amax6"], {"feedback": True}),
    "not rotated": WeightedCase(LAYOUTS["64 NHD"], {**BOTH, "rotate": False, "center": False}),
    **{
        f"scale {scale}": WeightedCase(LAYOUTS["64 NHD"], BOTH, scale, scale)
        for scale in (2.0**-40, 2.0**41, 1e-20, 3e37, 1e-42, 1.0)
    },
    **{
        f"broken scale {scale}": WeightedCase(LAYOUTS["64 NHD"], BOTH, torch.tensor(scale))
        for scale in (0.0, -0.01, float("nan"), float("inf"))
    },
}


def assert_stored_by_weights(
    store: Callable[..., None],
    case: WeightedCase,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    count: int = 90,
) -> None:
    """The reference's bytes, for random values and for edge cases.

    Args:
        store: as `reshape_and_cache`.
        count: tokens.
    """
    layout = case.layout
    heads, sizes = layout.num_kv_heads, (layout.head_size, layout.head_size_v)
    made = {"segments": count // SEGMENT + 1, "dtype": dtype, **case.options}
    transform = make_transform(heads, *sizes, **made)
    generator = torch.Generator().manual_seed(11)
    key, value = (torch.randn(count, heads, size, generator=generator) for size in sizes)
    hard = count // 2
    key[hard:] = 4 * nasty_values((count - hard, heads, sizes[0]))
    value[hard:] = nasty_values((count - hard, heads, sizes[1]), seed=1)
    key[hard - 2 : hard], value[hard - 2 : hard] = 0, 0
    if transform.mean is not None:  # some that are zero behind it
        means = transform.means(torch.arange(count))
        assert means is not None
        key[hard - 4 : hard - 2] = means[hard - 4 : hard - 2]
    slots = torch.randperm(count + 30, generator=generator)[:count]
    if count > 5:
        slots[5] = -1
    pages = []
    for write, where in ((reference_store, "cpu"), (store, device)):
        page = torch.zeros(
            -(-(count + 30) // layout.block_size),
            layout.page_bytes,
            dtype=torch.uint8,
            device=where,
        )
        write(
            key.to(where, dtype),
            value.to(where, dtype),
            page,
            slots.to(where),
            layout,
            on(case.k_scale, where),
            on(case.v_scale, where),
            on(transform, where),
            torch.arange(count, device=where),
        )
        pages.append(page.cpu())
    assert torch.equal(*pages)


def assert_tokens_are_stored_alone(store: Callable[..., None], layout: PageLayout) -> None:
    """The same bytes for any chunks, order of tokens and order of sequences."""
    heads, sizes = layout.num_kv_heads, (layout.head_size, layout.head_size_v)
    transform = make_transform(heads, *sizes, **BOTH)
    generator = torch.Generator().manual_seed(2)
    count = 67
    key, value = (torch.randn(count, heads, size, generator=generator) for size in sizes)
    slots = torch.randperm(80, generator=generator)[:count]
    positions = torch.arange(count)
    order = torch.randperm(count, generator=generator)
    pages = []
    for chunks in (
        [positions],
        [*positions.split(1)],
        [*positions.split(16)],
        [*positions.split(17)],
        [order],
        [*order.split(31)],
        [positions.flip(0)],
    ):
        page = torch.zeros(-(-80 // layout.block_size), layout.page_bytes, dtype=torch.uint8)
        for rows in chunks:
            arguments = (key[rows], value[rows], page, slots[rows], layout, 0.013, 0.004)
            store(*arguments, transform, positions[rows])
        pages.append(page)
    for other in pages[1:]:
        assert torch.equal(pages[0], other)
    quiet = replace(transform, feedback=None, k_weights=None, v_weights=None)
    page = torch.zeros_like(pages[0])
    store(key, value, page, slots, layout, 0.013, 0.004, quiet, positions)
    assert not torch.equal(page, pages[0])
