"""Write tokens to their slots and read them back, for every format and layout.

A slot is `page * block_size + offset`. `reshape_and_cache_reference` and `read_tokens` are pure
PyTorch: the reference for every store kernel, and the way in which the reference attention reads.
"""

import logging
import os
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType

import torch

from halfbyte.kvcache.quant_methods import KVCacheQuantMethod, get_kv_cache_quant_method
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.arguments import check_tensors
from halfbyte.layouts.page_layout import check_layout

logger = logging.getLogger(__name__)

_Scale = float | torch.Tensor
_Store = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PageLayout, _Scale, _Scale], None
]


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

    On a GPU with Triton that is one kernel launch, which never waits for the GPU and can be
    captured in a CUDA graph; it skips slots past the last page, and raises for them only where
    `HALFBYTE_DEBUG=1` is set, which makes every call wait. On a CPU it is a C++ kernel, where a
    compiler was at hand at installation. Elsewhere it is `reshape_and_cache_reference`, whose
    bytes are the same but for the payload of a NaN in a cache of floats.

    Args:
        key: float16, bfloat16 or float32 `[tokens, num_kv_heads, head_size]`, any strides.
        value: the same, `[tokens, num_kv_heads, head_size_v]`; its dtype may differ from that of
            `key`.
        pages: uint8 `[num_pages, page_stride]`, written in place.
        slot_mapping: int64 `[n]`, n <= tokens, on the device of `pages`; token i goes to slot i,
            tokens past n are ignored. Negative slots are padding and are skipped.
        layout: of `pages`.
        k_scale, v_scale: decode multipliers, floats or float32 scalar tensors, which are read on
            their device; formats without a global scale ignore them.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit the layout, a scale that is not
            positive and finite (of those on a GPU the values are not looked at), or a slot past the
            last page where that is checked.
    """
    _check_write(key, value, pages, slot_mapping, layout)
    layout.k_dtype.check_multiplier_on_host(k_scale, "k_scale")
    layout.v_dtype.check_multiplier_on_host(v_scale, "v_scale")
    find_store = {"cuda": _gpu_store, "cpu": _cpu_store}.get(pages.device.type)
    store = None if find_store is None else find_store(layout, key.dtype, value.dtype)
    if store is None:
        _store_reference(key, value, pages, slot_mapping, layout, k_scale, v_scale)
        return
    if pages.is_cuda and os.environ.get("HALFBYTE_DEBUG") == "1":
        _check_slots(pages, slot_mapping, layout)
    store(key, value, pages, slot_mapping, layout, k_scale, v_scale)


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """`reshape_and_cache` in pure PyTorch on any device: what every store kernel must equal.

    Waits for the device, and always raises ValueError for a slot past the last page.
    """
    _check_write(key, value, pages, slot_mapping, layout)
    _store_reference(key, value, pages, slot_mapping, layout, k_scale, v_scale)


def _store_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: PageLayout,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    _check_slots(pages, slot_mapping, layout)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
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


@lru_cache(maxsize=256)
def _gpu_store(
    layout: PageLayout, key_dtype: torch.dtype, value_dtype: torch.dtype
) -> _Store | None:
    """The store kernel for such inputs; None, said once in the log, where it cannot be used."""
    module = _store_kernel_module()
    if module is None:
        return None
    reason = module.unsupported_reason(layout, key_dtype, value_dtype)
    if reason is None:
        return module.store_tokens
    logger.info("K and V are stored by PyTorch operators: the kernel %s", reason)
    return None


@lru_cache(maxsize=256)
def _cpu_store(
    layout: PageLayout, key_dtype: torch.dtype, value_dtype: torch.dtype
) -> _Store | None:
    """The store kernel for such inputs, which raises for slots past the last page by itself."""
    from halfbyte.kernels import cpu_library, store_cpu

    if cpu_library.library() is None:
        cpu_library.say_missing()
        return None
    reason = store_cpu.unsupported_reason(layout, key_dtype, value_dtype)
    if reason is None:
        return store_cpu.store_tokens_cpu
    logger.info("K and V are stored by PyTorch operators: the kernel %s", reason)
    return None


@cache
def _store_kernel_module() -> ModuleType | None:
    try:
        return import_module("halfbyte.kernels.store")
    except ImportError as error:
        logger.info("K and V are stored by PyTorch operators, without Triton: %s", error)
        return None


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


def _check_slots(pages: torch.Tensor, slot_mapping: torch.Tensor, layout: PageLayout) -> None:
    """Raise ValueError for a slot past the last page; waits for the device."""
    capacity = pages.shape[0] * layout.block_size
    if slot_mapping.numel() and int(slot_mapping.max()) >= capacity:
        raise ValueError(
            f"slot_mapping: slot {int(slot_mapping.max())} is past the last, {capacity - 1}"
        )
