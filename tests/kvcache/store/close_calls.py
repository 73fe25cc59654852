"""K and V near rounding ties."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from kvcache.store.store_cases import reference_store
from kvcache.transforms import make_transform, on

G = 0.0130001  # its products with block scales are rounded
LAYOUT = PageLayout("nvfp4", "nvfp4", 128, None, 2, 16)
COUNT = 40
PLAIN: dict[str, Any] = {"rotate": False, "center": False, "first_tokens": 0}
Store = Callable[..., None]


def random_scales(generator: torch.Generator) -> torch.Tensor:
    """Block scales of normal E4M3 numbers `[tokens, heads, blocks, 1]`, times G."""
    bytes_ = torch.randint(30, 90, (COUNT, 2, 8, 1), generator=generator, dtype=torch.uint8)
    return bytes_.view(torch.float8_e4m3fn).float() * torch.tensor(G)


def close_scales() -> tuple[torch.Tensor, KVTransform]:
    """Values that two scales represent, and weights: errors are of the last bits alone."""
    generator = torch.Generator().manual_seed(4)
    scales = random_scales(generator)
    codes = torch.tensor([0.0, 1.5, 3.0, 6.0])[
        torch.randint(4, (COUNT, 2, 8, 16), generator=generator)
    ]
    codes[..., 3] = 6.0
    signs = torch.randint(2, codes.shape, generator=generator) * 2 - 1
    return (codes * scales * signs).flatten(-2), make_transform(2, 128, weighted=True, **PLAIN)


def close_values() -> tuple[torch.Tensor, KVTransform]:
    """Values a few units of the last place around a tie in the even channels, with feedback.

    Only odd channels get errors, so that the even ones stay where they are.
    """
    generator = torch.Generator().manual_seed(5)
    scales = random_scales(generator)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = ties[torch.randint(7, (COUNT, 2, 8, 16), generator=generator)]
    codes *= 1 + 2.0**-23 * torch.randint(-2, 3, codes.shape, generator=generator)
    codes[..., -1] = 6.0
    signs = torch.randint(2, codes.shape, generator=generator) * 2 - 1
    transform = make_transform(2, 128, feedback=True, **PLAIN)
    assert transform.feedback is not None
    pairs = torch.zeros(128, 128)
    pairs[torch.arange(0, 128, 2), torch.arange(1, 128, 2)] = 1.0
    return (codes * scales * signs).flatten(-2), replace(
        transform, feedback=(transform.feedback + 0.5) * pairs
    )


def large_scales(low: float, high: float) -> tuple[torch.Tensor, KVTransform]:
    """Random blocks with amax / (6 G) in a range: E4M3's largest number is 448."""
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(COUNT, 2, 8, 16, generator=generator)
    ratios = torch.empty(COUNT, 2, 8, 1).uniform_(low, high, generator=generator)
    values *= ratios * 6 * G / values.abs().amax(-1, keepdim=True)
    return values.flatten(-2), make_transform(2, 128, weighted=True, **PLAIN)


def scales_up_to_the_largest() -> tuple[torch.Tensor, KVTransform]:
    """Candidates that are the same byte, because none is above E4M3's largest number."""
    return large_scales(300, 463)


def scales_beyond_the_largest() -> tuple[torch.Tensor, KVTransform]:
    """Values of up to 8 times their block's scale."""
    return large_scales(420, 600)


def odd_weights() -> tuple[torch.Tensor, KVTransform]:
    """Weights that no calibration has."""
    transform = make_transform(2, 128, weighted=True, **PLAIN)
    assert transform.k_weights is not None
    weights = transform.k_weights.clone()
    weights[:, :16], weights[:, 16:32] = 0.0, -1.0
    weights[:, 32:48], weights[:, 48:64] = 2.0**-130, 2.0**120
    weights[:, 64], weights[:, 80] = torch.inf, torch.nan
    key = torch.randn(COUNT, 2, 128, generator=torch.Generator().manual_seed(6))
    return key, replace(transform, k_weights=weights)


def values_that_overflow() -> tuple[torch.Tensor, KVTransform]:
    """Errors that make later channels infinite, also in the last block; infinite channels."""
    transform = make_transform(2, 128, feedback=True, weighted=True, **PLAIN)
    assert transform.feedback is not None
    feedback = transform.feedback.clone()
    feedback[0, 5, 6], feedback[1, 120, 121] = 3e38, -3e38
    key = 30 * torch.randn(COUNT, 2, 128, generator=torch.Generator().manual_seed(7))
    key[3, 1, 127], key[4, 0, 17] = torch.inf, -torch.inf
    return key, replace(transform, feedback=feedback)


CLOSE_CALLS = {
    case.__name__: case
    for case in (
        close_scales,
        close_values,
        scales_up_to_the_largest,
        scales_beyond_the_largest,
        odd_weights,
        values_that_overflow,
    )
}


def assert_close_calls_are_stored(store: Store, name: str, device: str = "cpu") -> None:
    """The reference's bytes, for a case of `CLOSE_CALLS`."""
    key, transform = CLOSE_CALLS[name]()
    value = torch.randn(COUNT, 2, 128, generator=torch.Generator().manual_seed(8))
    slots = positions = torch.arange(COUNT)
    pages = []
    for write, where in ((reference_store, "cpu"), (store, device)):
        page = torch.zeros(3, LAYOUT.page_bytes, dtype=torch.uint8, device=where)
        arguments = (key, value, page, slots, LAYOUT, G, G, transform, positions)
        write(*(on(x, where) for x in arguments))
        pages.append(page.cpu())
    assert torch.equal(*pages)
