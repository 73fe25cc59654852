"""`reshape_and_cache`: validates its arguments and dispatches to a backend."""

import os
from typing import NamedTuple

import torch

from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store.base import Scale, StoreInputs, check_positions, check_slots
from halfbyte.kvcache.store.registry import select_store
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout
from halfbyte.layouts.arguments import check_tensors
from halfbyte.layouts.page_layout import check_layout


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    k_scale: Scale,
    v_scale: Scale,
    backend: str | None = None,
    *,
    transform: KVTransform | None = None,
    positions: torch.Tensor | None = None,
    recent: RingSlots | None = None,
) -> None:
    """Quantize K and V of each token and write them to its slot (vLLM's `reshape_and_cache_flash`).

    On a GPU with Triton this is one kernel launch, without a sync, which can be captured in a CUDA
    graph. It skips slots past the last page, and raises for them only with `HALFBYTE_DEBUG=1`,
    which syncs in every call. On a CPU it is a C++ kernel, if a compiler was available at
    installation. Otherwise PyTorch operators are used. All write the same bytes, except for the
    payload of a NaN in a cache of floats.

    Args:
        key: float16, bfloat16 or float32 `[tokens, num_kv_heads, head_size]`, any strides.
        value: the same, `[tokens, num_kv_heads, head_size_v]`; its dtype may differ from that of
            `key`.
        pages: uint8 `[num_pages, page_stride]`, written in place.
        slot_mapping: int64 `[n]`, n <= tokens, on the device of `pages`; token i goes to slot i,
            tokens past n are ignored. Negative slots are padding and are skipped.
        layout: of `pages`.
        k_scale, v_scale: global scales, floats or float32 scalar tensors, which are read on
            their device; formats without a global scale ignore them.
        backend: a name of `STORE_BACKENDS`; by default the best that can do the work.
        transform: a recipe's transform of K before packing; readers need the same.
        positions: int64 `[n]`, of each token in its sequence, padding not counted; those of padding
            slots do not matter. A transform needs them.
        recent: rings to which some of the tokens are also written, unquantized; with a transform on
            a GPU that is part of the same launch.

    Raises:
        NoImplementationError: the requested backend is unknown or cannot do the work.
        ValueError: shapes, dtypes or devices that do not fit the layout, a scale that is not
            positive and finite (of those on a GPU the values are not looked at), or a slot past the
            last page where that is checked.
    """
    inputs = StoreInputs(
        key=key,
        value=value,
        pages=pages,
        slot_mapping=slot_mapping,
        layout=layout,
        k_scale=k_scale,
        v_scale=v_scale,
        transform=transform,
        positions=positions,
        recent=recent,
    )
    _check(inputs)
    layout.k_dtype.check_scale_on_host(k_scale, "k_scale")
    layout.v_dtype.check_scale_on_host(v_scale, "v_scale")
    if transform is not None:
        check_positions(positions, slot_mapping, transform)
    store = select_store(inputs.config(), backend)
    if pages.is_cuda and os.environ.get("HALFBYTE_DEBUG") == "1":
        check_slots(inputs)
    store.store(inputs)


class NewTokens(NamedTuple):
    """A step's tokens, to be stored with `reshape_and_cache`; see there for the fields."""

    key: torch.Tensor
    value: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None = None
    recent: RingSlots | None = None

    def store(
        self,
        pages: torch.Tensor,
        layout: PageLayout,
        k_scale: Scale,
        v_scale: Scale,
        transform: KVTransform | None = None,
    ) -> None:
        """`reshape_and_cache`; see there for the arguments."""
        reshape_and_cache(
            self.key,
            self.value,
            pages,
            self.slot_mapping,
            layout,
            k_scale,
            v_scale,
            transform=transform,
            positions=self.positions,
            recent=self.recent,
        )


def _check(inputs: StoreInputs) -> None:
    key, value, pages, slot_mapping, layout = inputs[:5]
    check_layout(layout)
    check_tensors(key=key, value=value, pages=pages, slot_mapping=slot_mapping)
    layout.check_pages(pages)
    for name, x, head_size in (
        ("key", key, layout.head_size),
        ("value", value, layout.head_size_v),
    ):
        if x.dim() != 3 or tuple(x.shape[1:]) != (layout.num_kv_heads, head_size):
            raise ValueError(
                f"{name}: expected [tokens, {layout.num_kv_heads}, {head_size}], "
                f"got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point tensor, got {x.dtype}")
        if x.device != pages.device:
            raise ValueError(f"{name}: is on {x.device}, pages are on {pages.device}")
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping: expected int64 [tokens], got {slot_mapping.dtype} "
            f"{tuple(slot_mapping.shape)}"
        )
    if slot_mapping.device != pages.device:
        raise ValueError(f"slot_mapping: is on {slot_mapping.device}, pages are on {pages.device}")
    if not slot_mapping.shape[0] <= min(key.shape[0], value.shape[0]):
        raise ValueError(
            f"slot_mapping: {slot_mapping.shape[0]} slots for {key.shape[0]} keys and "
            f"{value.shape[0]} values"
        )
