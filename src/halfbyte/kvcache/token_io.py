"""Write tokens to their slots and read them back, in pure PyTorch, for every format and layout.

A slot is `page * block_size + offset`. This is the reference for every store kernel and the way in
which the reference attention reads.
"""

from functools import cache

import torch

from halfbyte.kvcache.quant_methods import KVCacheQuantMethod, get_kv_cache_quant_method
from halfbyte.layouts import KVCacheDType, PageLayout


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Quantize K and V of each token and write them to its slot (vLLM's `reshape_and_cache_flash`).

    Args:
        key: float16, bfloat16 or float32 `[tokens, num_kv_heads, head_size]`, any strides.
        value: the same, `[tokens, num_kv_heads, head_size_v]`.
        pages: uint8 `[num_pages, page_stride]`, written in place.
        slot_mapping: int64 `[n]`, n <= tokens; token i goes to slot i, tokens past n are ignored.
            Negative slots are padding and are skipped.
        layout: of `pages`.
        k_scale, v_scale: decode multipliers, floats or float32 scalar tensors; formats without a
            global scale ignore them.

    Raises:
        ValueError: shapes or dtypes that do not fit the layout, or a slot past the last page.
    """
    _check_write(key, value, pages, slot_mapping, layout)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    capacity = pages.shape[0] * layout.block_size
    if slots.numel() and int(slots.max()) >= capacity:
        raise ValueError(f"slot_mapping: slot {int(slots.max())} is past the last, {capacity - 1}")
    count = slot_mapping.shape[0]
    key, value = key[:count][keep], value[:count][keep]
    page, offset = slots // layout.block_size, slots % layout.block_size
    views = layout.views(pages)
    # Both are encoded before either is written, so that an error leaves no half token.
    k_data, k_scales = _method(layout.k_dtype).quantize(key, k_scale)
    v_data, v_scales = _method(layout.v_dtype).quantize(value, v_scale)
    views.k_data[page, offset] = k_data
    if views.k_scale is not None and k_scales is not None:
        views.k_scale[page, offset] = k_scales
    views.v_data[page, offset] = v_data
    if views.v_scale is not None and v_scales is not None:
        views.v_scale[_v_scale_index(layout, page, offset)] = v_scales


def read_tokens(
    pages: torch.Tensor,
    slots: torch.Tensor,
    layout: PageLayout,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized K and V of the tokens in `slots`.

    Args:
        pages, layout, k_scale, v_scale: as for `reshape_and_cache`.
        slots: int64 `[n]`, all >= 0.
        dtype: of the result.

    Returns:
        K `[n, num_kv_heads, head_size]` and V `[n, num_kv_heads, head_size_v]`.
    """
    views = layout.views(pages)
    page, offset = slots // layout.block_size, slots % layout.block_size
    k_block_scales = None if views.k_scale is None else views.k_scale[page, offset]
    key = _method(layout.k_dtype).dequantize(
        views.k_data[page, offset], k_block_scales, k_scale, dtype
    )
    v_block_scales = None
    if views.v_scale is not None:
        v_block_scales = views.v_scale[_v_scale_index(layout, page, offset)]
    value = _method(layout.v_dtype).dequantize(
        views.v_data[page, offset], v_block_scales, v_scale, dtype
    )
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


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
) -> None:
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
    if not slot_mapping.shape[0] <= min(key.shape[0], value.shape[0]):
        raise ValueError(
            f"slot_mapping: {slot_mapping.shape[0]} slots for {key.shape[0]} keys and "
            f"{value.shape[0]} values"
        )
