"""Names of cache formats, the geometry of pages, and orders of block scales."""

from halfbyte.layouts.kv_cache_dtype import KVCacheDType
from halfbyte.layouts.page_layout import PageLayout, PageViews, Region, page_stride
from halfbyte.layouts.scale_layouts import swizzle_128x4, unswizzle_128x4, v_scale_position

__all__ = [
    "KVCacheDType",
    "PageLayout",
    "PageViews",
    "Region",
    "page_stride",
    "swizzle_128x4",
    "unswizzle_128x4",
    "v_scale_position",
]
