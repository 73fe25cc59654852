"""Pages and block tables in FlashInfer's format, without a copy of the pages.

FlashInfer follows the strides of what it is given (0.7.0: `paged_kv_t` in `page.cuh` and
`GetFP4ScaleStrides` in `tvm_ffi_utils.h` for fa2, `kernelParams.h` for trtllm-gen), so views of a
page's regions will do, as long as its loads stay aligned: fa2 loads 16 bytes of 8- and 16-bit
data, 8 of packed codes and 4 of scales at a time (`prefill.cuh`); trtllm-gen goes through TMA,
whose bases and strides are multiples of 32 bytes for unpacked 4-bit codes and of 16 for scales.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from halfbyte.layouts import PageLayout

_ELEMENTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16)
"""Dtypes of a cache without block scales that FlashInfer reads."""


class KVCacheViews(NamedTuple):
    """FlashInfer's `paged_kv_cache` and `kv_cache_sf`, in the layout's order."""

    data: tuple[torch.Tensor, torch.Tensor]
    """K and V `[pages, heads, tokens, width]` for HND, `[pages, tokens, heads, width]` for NHD."""
    scales: tuple[torch.Tensor, torch.Tensor] | None
    """float8_e4m3fn, the same dimensions; None for formats without block scales."""


class PageTable(NamedTuple):
    """A block table as FlashInfer's wrappers plan with it: `indices` stays on the device."""

    indptr: torch.Tensor
    """int32 `[sequences + 1]` on the host, where each sequence's pages begin in `indices`."""
    indices: torch.Tensor
    """int32, the pages of all sequences in order."""
    last_page_len: torch.Tensor
    """int32 `[sequences]` on the host, tokens in each sequence's last page."""


def flashinfer_dtype(layout: PageLayout) -> torch.dtype | None:
    """FlashInfer's `kv_data_type` of a layout; None where it has none."""
    k_dtype, v_dtype = layout.k_dtype, layout.v_dtype
    if k_dtype.is_nvfp4 and v_dtype.is_nvfp4:
        return torch.uint8
    if k_dtype != v_dtype:
        return None
    row = k_dtype.kv_format
    return row.element if row.element in _ELEMENTS and row.block_size is None else None


def kv_cache_views(pages: torch.Tensor, layout: PageLayout) -> KVCacheViews:
    """Views of pages as FlashInfer indexes them.

    Args:
        pages: uint8 `[num_pages, page_stride]`.
        layout: of `pages`.

    Raises:
        ValueError: a format that it does not have, or bases or strides that its loads cannot have.
    """
    dtype = flashinfer_dtype(layout)
    if dtype is None:
        raise ValueError(f"layout: FlashInfer has no K {layout.k_dtype} with V {layout.v_dtype}")
    _check_alignment(pages, layout)
    views = layout.views(pages)

    def ordered(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (view.transpose(1, 2) if layout.order == "HND" else view).view(dtype)

    scales = None
    if views.k_scale is not None and views.v_scale is not None:
        e4m3 = layout.k_dtype.kv_format.scale_dtype
        assert e4m3 is not None
        scales = (ordered(views.k_scale, e4m3), ordered(views.v_scale, e4m3))
    return KVCacheViews((ordered(views.k_data, dtype), ordered(views.v_data, dtype)), scales)


def page_table(block_tables: torch.Tensor, seq_lens: Sequence[int], block_size: int) -> PageTable:
    """The compressed form of int32 `[sequences, max_pages]` block tables; lengths at least 1."""
    lengths = np.array(seq_lens, dtype=np.int64)
    counts = -(-lengths // block_size)
    indptr = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(indptr[-1]) - indptr[:-1][row]
    flat = torch.from_numpy(row * block_tables.shape[1] + column).to(block_tables.device)
    return PageTable(
        torch.from_numpy(indptr).int(),
        block_tables.flatten()[flat],
        torch.from_numpy(lengths - (counts - 1) * block_size).int(),
    )


def _check_alignment(pages: torch.Tensor, layout: PageLayout) -> None:
    tma = layout.v_scale_layout == "sm100"
    for region in layout.regions:
        is_scale = region.name.endswith("scale")
        if is_scale:
            needed = 16 if tma else 4
        elif flashinfer_dtype(layout) == torch.uint8:
            needed = 32 if tma else 8
        else:
            needed = 16
        strides = {"pages": pages.stride(0), "heads": region.head_stride}
        if not (tma and is_scale):  # TMA reads a head's scales as one row, whatever a token has
            strides["tokens"] = region.token_stride
        base = pages.data_ptr() + region.offset
        if any(value % needed for value in (base, *strides.values())):
            raise ValueError(
                f"pages: FlashInfer reads {region.name} in units of {needed} bytes; its base "
                f"{base:#x} and strides {strides} must be multiples of that"
            )
