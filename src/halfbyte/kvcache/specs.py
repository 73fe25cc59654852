"""Cache requirements of a layer: bytes per page, and which pages stay alive.

All byte counts come from `PageLayout`, so that new kinds of attention support every format.
"""

from dataclasses import dataclass, replace

import torch

from halfbyte.layouts import KVCacheDType, PageLayout


@dataclass(frozen=True)
class KVCacheSpec:
    """Geometry and format of one layer's cache.

    Args:
        block_size: tokens per page.
        num_kv_heads: KV heads.
        head_size, head_size_v: values per head of K and of V (None: as K).
        kv_cache_dtype: format of K and V; `auto` is the model's dtype.
        dtype: the model's dtype, for unquantized caches.
        v_cache_dtype: format of V where it differs from K's.
        page_size_padded: bytes that a page takes in its pool; None for no padding.

    Raises:
        ValueError: as `PageLayout`, or a padded size below the content's.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    kv_cache_dtype: str | KVCacheDType = "auto"
    dtype: torch.dtype = torch.bfloat16
    v_cache_dtype: str | KVCacheDType | None = None
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        content = self.real_page_size_bytes
        if self.page_size_padded is not None and self.page_size_padded < content:
            raise ValueError(
                f"page_size_padded: {self.page_size_padded} bytes cannot hold {content} of content"
            )

    @property
    def layout(self) -> PageLayout:
        """The layout of this layer's pages."""
        k_dtype = KVCacheDType.parse(self.kv_cache_dtype).resolve(self.dtype)
        v_dtype = k_dtype
        if self.v_cache_dtype is not None:
            v_dtype = KVCacheDType.parse(self.v_cache_dtype).resolve(self.dtype)
        return PageLayout(
            k_dtype,
            v_dtype,
            self.head_size,
            self.head_size_v,
            self.num_kv_heads,
            self.block_size,
        )

    @property
    def real_page_size_bytes(self) -> int:
        """Content bytes of a page of this layer."""
        return self.layout.page_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that a page of this layer takes, padding included."""
        return self.page_size_padded or self.real_page_size_bytes

    def with_block_size(self, block_size: int) -> "KVCacheSpec":
        """The same layer with pages of another size, unpadded."""
        return replace(self, block_size=block_size, page_size_padded=None)

    def with_num_kv_heads(self, num_kv_heads: int) -> "KVCacheSpec":
        """The same layer with another number of KV heads, unpadded where that changes it."""
        if num_kv_heads == self.num_kv_heads:
            return self
        return replace(self, num_kv_heads=num_kv_heads, page_size_padded=None)

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """First token that the queries from `num_computed_tokens` on may attend to."""
        return 0

    def num_dead_pages(self, num_computed_tokens: int) -> int:
        """Leading pages of a sequence that will not be read again."""
        return self.first_needed_token(num_computed_tokens) // self.block_size

    def max_live_pages(self, num_tokens: int, max_chunk: int = 1) -> int:
        """Max pages held at once by a sequence of up to `num_tokens`, with chunked prefill."""
        pages = -(-num_tokens // self.block_size)
        live = self._longest_live_range(max_chunk)
        # In the worst case the range starts at the last token of a page.
        return pages if live is None else min(pages, (live - 2) // self.block_size + 2)

    def _longest_live_range(self, max_chunk: int) -> int | None:
        """Max tokens alive at the end of a chunk; None if all stay alive."""
        return None


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """A layer whose queries attend to every earlier token."""


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A layer whose query q attends to keys k with `q - k < sliding_window`.

    Args:
        sliding_window: window in tokens, the query's own included.
    """

    sliding_window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window <= 0:
            raise ValueError(f"sliding_window: expected at least 1, got {self.sliding_window}")

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The oldest key in the next query's window."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def _longest_live_range(self, max_chunk: int) -> int:
        return self.sliding_window - 1 + max_chunk


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A layer whose queries attend within their own chunk of the sequence (Llama 4).

    Args:
        attention_chunk_size: tokens per chunk.
    """

    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_chunk_size <= 0:
            raise ValueError(
                f"attention_chunk_size: expected at least 1, got {self.attention_chunk_size}"
            )

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The start of the next query's chunk."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def _longest_live_range(self, max_chunk: int) -> int:
        return self.attention_chunk_size - 1 + max_chunk
