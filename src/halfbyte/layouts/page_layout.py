"""The layout of a page, byte by byte. Writers and readers use the same object.

A page holds `block_size` tokens of one layer as `[K_data | K_scale | V_data | V_scale]` (vLLM PR
37332); a format without block scales leaves its scale region out. Within a region the order is

    HND   head-major:  [head][token][bytes]
    NHD   token-major: [token][head][bytes]

Views are always indexed `[page, token, head, byte or element]`; the order affects only their
strides, so code that indexes them works for both. Pages are rows of a uint8 tensor whose row stride
may exceed `page_bytes`: with padding, and in pools where a row has pages of all layers of a group.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from halfbyte.layouts.arguments import integer
from halfbyte.layouts.kv_cache_dtype import KVCacheDType
from halfbyte.layouts.scale_layouts import VScaleLayout, check_sm100, v_scale_position

Order = Literal["HND", "NHD"]


class Region(NamedTuple):
    """A part of the page; offset and strides in bytes."""

    name: str
    offset: int
    width: int
    """Bytes of one head of one token."""
    token_stride: int
    head_stride: int
    dtype: torch.dtype
    nbytes: int


class PageViews(NamedTuple):
    """Zero-copy views `[num_pages, block_size, num_kv_heads, width]` of a tensor of pages.

    Data is uint8 for quantized formats (`width` bytes), else of the format's dtype (`width` =
    head size). Scales are uint8; None for formats without block scales. `v_scale` holds the raw
    order of the layout: element [page, row, head, column] as `PageLayout.v_scale_position` says.
    """

    k_data: torch.Tensor
    k_scale: torch.Tensor | None
    v_data: torch.Tensor
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class PageLayout:
    """Geometry of one layer's page.

    Args:
        k_dtype, v_dtype: formats of K and V (names or `KVCacheDType`), not `auto`.
        head_size, head_size_v: values per head of K and of V (`None`: as K).
        num_kv_heads: KV heads.
        block_size: tokens per page.
        order: `HND` or `NHD`.
        v_scale_layout: `linear`, or `sm100` for V scales as the trtllm-gen reader wants them.

    Raises:
        ValueError: a size that is not a positive integer, a head size that the format cannot
            store, an unknown order, or `sm100` where it cannot be.
    """

    k_dtype: KVCacheDType
    v_dtype: KVCacheDType
    head_size: int
    head_size_v: int
    num_kv_heads: int
    block_size: int
    order: Order
    v_scale_layout: VScaleLayout

    def __init__(
        self,
        k_dtype: KVCacheDType | str,
        v_dtype: KVCacheDType | str,
        head_size: int,
        head_size_v: int | None,
        num_kv_heads: int,
        block_size: int,
        order: Order = "HND",
        v_scale_layout: VScaleLayout = "linear",
    ) -> None:
        fields = {
            "k_dtype": KVCacheDType.parse(k_dtype),
            "v_dtype": KVCacheDType.parse(v_dtype),
            "head_size": integer("head_size", head_size),
            "head_size_v": integer(
                "head_size_v", head_size if head_size_v is None else head_size_v
            ),
            "num_kv_heads": integer("num_kv_heads", num_kv_heads),
            "block_size": integer("block_size", block_size),
            "order": order,
            "v_scale_layout": v_scale_layout,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in ("num_kv_heads", "block_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.order not in ("HND", "NHD"):
            raise ValueError(f"order: expected 'HND' or 'NHD', got {self.order!r}")
        if self.v_scale_layout not in ("linear", "sm100"):
            raise ValueError(
                f"v_scale_layout: expected 'linear' or 'sm100', got {self.v_scale_layout!r}"
            )
        self.k_dtype.check_head_size(self.head_size, "head_size")
        self.v_dtype.check_head_size(self.head_size_v, "head_size_v")
        if self.v_scale_layout == "sm100":
            if not self.v_dtype.is_nvfp4:
                raise ValueError(f"v_scale_layout 'sm100' is for nvfp4 V, got {self.v_dtype}")
            check_sm100(self.block_size, self.v_dtype.scale_bytes(self.head_size_v))
        for region in self.regions:
            if region.offset % region.dtype.itemsize:
                raise ValueError(
                    f"block_size: {self.block_size} tokens leave {region.name} at byte "
                    f"{region.offset}, not a multiple of its {region.dtype.itemsize}-byte elements"
                )

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of a page in order: k_data, k_scale, v_data, v_scale where they exist."""
        regions: list[Region] = []
        offset = 0
        for side, dtype, head_size in (
            ("k", self.k_dtype, self.head_size),
            ("v", self.v_dtype, self.head_size_v),
        ):
            for part, width, element in (
                ("data", dtype.data_bytes(head_size), dtype.storage_dtype),
                ("scale", dtype.scale_bytes(head_size), torch.uint8),
            ):
                if width == 0:
                    continue
                region = self._region(f"{side}_{part}", offset, width, element)
                regions.append(region)
                offset += region.nbytes
        return tuple(regions)

    def _region(self, name: str, offset: int, width: int, dtype: torch.dtype) -> Region:
        if self.order == "HND":
            token_stride, head_stride = width, self.block_size * width
        else:
            token_stride, head_stride = self.num_kv_heads * width, width
        nbytes = self.block_size * self.num_kv_heads * width
        return Region(name, offset, width, token_stride, head_stride, dtype, nbytes)

    @cached_property
    def page_bytes(self) -> int:
        """Content bytes of a page, without padding."""
        return sum(region.nbytes for region in self.regions)

    @property
    def bytes_per_token(self) -> float:
        """Content bytes per token (all KV heads, K and V)."""
        return self.page_bytes / self.block_size

    def unknown_format(self, known: Container[KVCacheDType]) -> str | None:
        """Why kernels with support for `known` formats cannot use this layout; None if they can."""
        for name, dtype in (("K", self.k_dtype), ("V", self.v_dtype)):
            if dtype not in known:
                return f"does not know the format of {name}, {dtype}"
        return None

    def check_pages(self, pages: torch.Tensor) -> None:
        """Raise ValueError unless `pages` can hold pages of this layout."""
        if pages.dtype != torch.uint8 or pages.dim() != 2:
            raise ValueError(
                f"pages: expected uint8 [num_pages, page_stride], got {pages.dtype} "
                f"{tuple(pages.shape)}"
            )
        # A single page cannot overlap another one, whatever its row stride.
        row_stride = pages.stride(0) if pages.shape[0] > 1 else self.page_bytes
        column_stride = pages.stride(1) if pages.numel() else 1
        if min(pages.shape[1], row_stride) < self.page_bytes or column_stride != 1:
            raise ValueError(
                f"pages: rows of {pages.shape[1]} bytes with strides {pages.stride()} cannot hold "
                f"contiguous pages of {self.page_bytes} bytes of {self}"
            )

    @cached_property
    def alignment(self) -> int:
        """Bytes of the largest stored float, of which pages must be multiples; else 1."""
        return max(dtype.storage_dtype.itemsize for dtype in (self.k_dtype, self.v_dtype))

    def check_alignment(self, pages: torch.Tensor) -> None:
        """Raise ValueError for pages that are not aligned as 16- or 32-bit formats need."""
        stride = page_stride(pages)
        if self.alignment > 1 and (pages.data_ptr() | stride) % self.alignment:
            raise ValueError(
                f"pages: the base {pages.data_ptr():#x} and the stride {stride} must be multiples "
                f"of {self.alignment} bytes for K in {self.k_dtype} and V in {self.v_dtype}"
            )

    def views(self, pages: torch.Tensor) -> PageViews:
        """Views of every region of `pages` (uint8 `[num_pages, page_stride]`).

        Raises:
            ValueError: `pages` cannot hold this layout, or its alignment does not suit a 16- or
                32-bit format.
        """
        self.check_pages(pages)
        by_name = {region.name: self._view(pages, region) for region in self.regions}
        return PageViews(
            by_name["k_data"], by_name.get("k_scale"), by_name["v_data"], by_name.get("v_scale")
        )

    def _view(self, pages: torch.Tensor, region: Region) -> torch.Tensor:
        raw = pages.as_strided(
            (pages.shape[0], self.block_size, self.num_kv_heads, region.width),
            (page_stride(pages), region.token_stride, region.head_stride, 1),
            pages.storage_offset() + region.offset,
        )
        if raw.storage_offset() % region.dtype.itemsize or raw.stride(0) % region.dtype.itemsize:
            raise ValueError(
                f"pages: page stride {raw.stride(0)} and offset {raw.storage_offset()} must be "
                f"multiples of {region.dtype.itemsize} bytes for {region.name} in {region.dtype}"
            )
        return raw.view(region.dtype)

    def v_scale_position(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, column), int64 `[block_size, scales per token]`, of each V scale in its view."""
        num_blocks = self.v_dtype.scale_bytes(self.head_size_v)
        return v_scale_position(self.block_size, num_blocks, self.v_scale_layout, device)


def page_stride(pages: torch.Tensor) -> int:
    """Bytes from a page to the next; 0 for a single page, whose stride may be anything."""
    return pages.stride(0) if pages.shape[0] > 1 else 0


def check_layout(layout: object) -> None:
    """Raise ValueError for anything but a `PageLayout`."""
    if not isinstance(layout, PageLayout):
        raise ValueError(f"layout: expected a PageLayout, got {type(layout).__name__}")
