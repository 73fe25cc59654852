"""Formats of a layer's K and V, and its pages in the tensor that vLLM allocates.

vLLM computes the page size and allocates the tensor. halfbyte's page
`[K_data | K_scale | V_data | V_scale]` has the same number of contiguous bytes, in its own order.
"""

from dataclasses import dataclass

import torch

from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.plugins.vllm.options import ALL_CACHE_DTYPES, Options, sides_refused

CARRIER = "nvfp4"
"""vLLM's cache dtype for which `k_dtype` and `v_dtype` apply: vLLM treats its pages as bytes."""


@dataclass(frozen=True)
class LayerFormat:
    """Formats of K and V of a layer."""

    k: KVCacheDType
    v: KVCacheDType

    @classmethod
    def of(cls, cache_dtype: str, model_dtype: torch.dtype, options: Options) -> "LayerFormat":
        """From vLLM's cache dtype for the layer; `auto` means the model's dtype here.

        Raises:
            ValueError: an unsupported cache dtype.
            OptionError: `k_dtype` or `v_dtype` with a cache dtype other than nvfp4.
        """
        if cache_dtype not in ALL_CACHE_DTYPES:
            valid = ", ".join(ALL_CACHE_DTYPES)
            raise ValueError(f"--kv-cache-dtype: expected one of {valid}, got {cache_dtype!r}")
        both = KVCacheDType.parse(model_dtype if cache_dtype == "auto" else cache_dtype)
        both = options.recipe.format_of(both)
        if cache_dtype != CARRIER:
            # Skipped layers (kv_cache_dtype_skip_layers) stay unquantized.
            if both.is_quantized and (options.k_dtype or options.v_dtype):
                raise sides_refused(options, CARRIER, cache_dtype)
            return cls(both, both)
        given = (
            both
            if d is None
            else options.recipe.format_of(KVCacheDType.parse(d).resolve(model_dtype))
            for d in (options.k_dtype, options.v_dtype)
        )
        return cls(*given)

    def cell_bytes(self, head_size: int, head_size_v: int) -> int:
        """Bytes of one token of one KV head, K and V with their block scales."""
        return sum(
            dtype.data_bytes(size) + dtype.scale_bytes(size)
            for dtype, size in ((self.k, head_size), (self.v, head_size_v))
        )

    def layout(
        self, head_size: int, head_size_v: int, num_kv_heads: int, block_size: int
    ) -> PageLayout:
        """Layout of a page."""
        return PageLayout(
            self.k, self.v, head_size, head_size_v, num_kv_heads, block_size, order="HND"
        )


def block_size_of(kv_cache: torch.Tensor) -> int:
    """Tokens per page of a layer's cache.

    Args:
        kv_cache: `[pages, heads, tokens, content]` of vLLM 0.32, or `[pages, 2, heads, tokens,
            content]` of 0.24.
    """
    return kv_cache.shape[2] if kv_cache.dim() == 4 else kv_cache.shape[3]


def pages_of(kv_cache: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """View vLLM's cache as halfbyte's pages, uint8 `[num_pages, page_bytes]`.

    The stride between pages may exceed their size (padding in hybrid models, several layers per
    block), but each page must be contiguous.

    Raises:
        ValueError: another page size, or pages that are not contiguous.
    """
    raw = kv_cache.view(torch.uint8) if kv_cache.dtype != torch.uint8 else kv_cache
    page_bytes = raw.shape[1:].numel()
    if page_bytes != layout.page_bytes:
        raise ValueError(
            f"kv_cache: a page of {tuple(kv_cache.shape[1:])} {kv_cache.dtype} has {page_bytes} "
            f"bytes, expected {layout.page_bytes} for {layout}"
        )
    run = 1
    dims = zip(raw.stride()[1:], raw.shape[1:], strict=True)
    for stride, size in sorted(dims):
        if size > 1 and stride != run:
            raise ValueError(
                f"kv_cache: expected pages of one run of bytes, got shape {tuple(raw.shape)} with "
                f"strides {raw.stride()}"
            )
        run *= size
    return raw.as_strided((raw.shape[0], page_bytes), (raw.stride(0), 1), raw.storage_offset())
