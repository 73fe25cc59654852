"""Write tokens to their slots and read them back in pure PyTorch, for every format and layout.

The reference for every store kernel; the reference attention reads with it.
"""

from functools import cache
from typing import ClassVar

import torch

from halfbyte.dispatch import Answer
from halfbyte.kvcache.quant_methods import KVCacheQuantMethod, get_kv_cache_quant_method
from halfbyte.kvcache.store.base import (
    Scale,
    StoreBackend,
    StoreConfig,
    StoreInputs,
    check_slots,
)
from halfbyte.kvcache.transform import MARK, KVTransform
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.numerics import weighted_rounding


class ReferenceStore(StoreBackend):
    """For any device; syncs it, and always raises for a slot past the last page."""

    name: ClassVar[str] = "reference"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Everywhere."""
        return True, "runs wherever PyTorch does"

    @classmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Everything."""
        return True, "every format and dtype"

    @classmethod
    def store(cls, inputs: StoreInputs) -> None:
        """See `StoreBackend.store`."""
        layout, transform = inputs.layout, inputs.transform
        check_slots(inputs)
        if inputs.recent is not None:
            inputs.recent.write(inputs.key, inputs.value)
        keep = inputs.slot_mapping >= 0
        slots = inputs.slot_mapping[keep]
        key, value = (x[: len(keep)][keep] for x in (inputs.key, inputs.value))
        first: torch.Tensor | None = None
        if transform is not None:
            assert inputs.positions is not None
            positions = inputs.positions[keep]
            at_start = (positions == 0).nonzero().flatten()
            first = transform.match_first(key[at_start], value[at_start])
            key = transform.forward(key, positions)
        page, offset = slots // layout.block_size, slots % layout.block_size
        views = layout.views(inputs.pages)
        # Both are encoded before either is written, so that an error leaves no partial token.
        k_data, k_scales = _quantize_key(key, inputs.k_scale, layout.k_dtype, transform)
        v_data, v_scales = _quantize_value(value, inputs.v_scale, layout.v_dtype, transform)
        _check_packed(layout.k_dtype, (k_data, k_scales), (views.k_data, views.k_scale))
        _check_packed(layout.v_dtype, (v_data, v_scales), (views.v_data, views.v_scale))
        if first is not None and k_scales is not None:
            heads = (first >= 0).nonzero()
            rows = at_start[heads[:, 0]], heads[:, 1]
            k_data[rows], k_scales[rows] = 0, 0
            k_data[(*rows, 0)] = first[first >= 0].to(torch.uint8)
            k_scales[(*rows, 0)] = MARK
        views.k_data[page, offset] = k_data
        if views.k_scale is not None and k_scales is not None:
            views.k_scale[page, offset] = k_scales
        views.v_data[page, offset] = v_data
        if views.v_scale is not None and v_scales is not None:
            views.v_scale[_v_scale_index(layout, page, offset)] = v_scales


_Packed = tuple[torch.Tensor, torch.Tensor | None]


def _quantize_key(
    key: torch.Tensor, scale: Scale, dtype: KVCacheDType, transform: KVTransform | None
) -> _Packed:
    """Codes and block scales of K'."""
    if transform is None or not transform.weighs_errors:
        return _method(dtype).quantize(key, scale)
    recipe = dtype.kv_format.nvfp4_recipe or "amax6"
    data, scales = weighted_rounding.quantize(
        key, scale, transform.k_weights, transform.feedback, recipe
    )
    return data, scales.view(torch.uint8)


def _quantize_value(
    value: torch.Tensor, scale: Scale, dtype: KVCacheDType, transform: KVTransform | None
) -> _Packed:
    """Codes and block scales of V."""
    if transform is None or transform.v_weights is None or not dtype.is_nvfp4:
        return _method(dtype).quantize(value, scale)
    data, scales = weighted_rounding.quantize(value, scale, transform.v_weights)
    return data, scales.view(torch.uint8)


def _check_packed(dtype: KVCacheDType, packed: _Packed, views: _Packed) -> None:
    """Raise ValueError unless a method's tensors fit the page; PyTorch would cast and broadcast."""
    for name, tensor, view in zip(("data", "scales"), packed, views, strict=True):
        ours, wanted = (
            None if x is None else f"{x.dtype} [..., {x.shape[-1]}]" for x in (tensor, view)
        )
        if ours != wanted:
            raise ValueError(f"{dtype}: quantize returned {name} {ours}, its pages have {wanted}")


def read_tokens(
    pages: torch.Tensor,
    slots: torch.Tensor,
    layout: PageLayout,
    k_scale: Scale,
    v_scale: Scale,
    dtype: torch.dtype = torch.float32,
    *,
    transform: KVTransform | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized K and V of the tokens in `slots`.

    Args:
        pages, layout, k_scale, v_scale, transform: as for `halfbyte.kvcache.reshape_and_cache`.
        slots: int64 `[n]`, all >= 0.
        dtype: of the result.
        positions: int64 `[n]`, of the tokens in their sequences; a transform needs them.

    Returns:
        K `[n, num_kv_heads, head_size]` and V `[n, num_kv_heads, head_size_v]`.
    """
    views = layout.views(pages)
    page, offset = slots // layout.block_size, slots % layout.block_size
    k_data = views.k_data[page, offset]
    k_block_scales = None if views.k_scale is None else views.k_scale[page, offset]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    key = _method(layout.k_dtype).dequantize(
        k_data, k_block_scales, k_scale, dtype if transform is None else compute
    )
    v_block_scales = None
    if views.v_scale is not None:
        v_block_scales = views.v_scale[_v_scale_index(layout, page, offset)]
    value = _method(layout.v_dtype).dequantize(
        views.v_data[page, offset], v_block_scales, v_scale, dtype
    )
    if transform is None:
        return key, value
    assert positions is not None
    key = transform.inverse(key, positions).to(dtype)
    if transform.first_keys is not None and k_block_scales is not None:
        assert transform.first_values is not None
        marked = (k_block_scales[..., 0].view(torch.uint8) == MARK) & (positions == 0)[:, None]
        token, head = marked.nonzero(as_tuple=True)
        index = k_data[token, head, 0].long()
        key[token, head] = transform.first_keys[index, head].to(dtype)
        value[token, head] = transform.first_values[index, head].to(dtype)
    return key, value


@cache
def _method(dtype: KVCacheDType) -> KVCacheQuantMethod:
    return get_kv_cache_quant_method(dtype)


def _v_scale_index(
    layout: PageLayout, page: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Index of `[n, num_kv_heads, blocks]` scales in the raw view, whatever their order."""
    if layout.v_scale_layout == "linear":
        return page, offset
    row, column = layout.v_scale_position(page.device)
    heads = torch.arange(layout.num_kv_heads, device=page.device)
    return (
        page[:, None, None],
        row[offset][:, None, :],
        heads[None, :, None],
        column[offset][:, None, :],
    )
