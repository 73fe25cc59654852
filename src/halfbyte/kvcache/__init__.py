"""The paged KV cache: sizes and contents of pages, the pool, and block tables."""

from halfbyte.kvcache.allocator import NULL_PAGE, OutOfPagesError, PageAllocator
from halfbyte.kvcache.plan import KVCacheGroup, KVCachePlan, plan_kv_cache
from halfbyte.kvcache.pool import PagedKVPool
from halfbyte.kvcache.quant_methods import (
    KV_CACHE_QUANT_REGISTRY,
    KVCacheQuantMethod,
    get_kv_cache_quant_method,
)
from halfbyte.kvcache.recipe import KVRecipe
from halfbyte.kvcache.scales import KV_SCALES_FILE, KVScales
from halfbyte.kvcache.sequences import HostSequence, SequenceTables
from halfbyte.kvcache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from halfbyte.kvcache.store import STORE_BACKENDS, NewTokens, read_tokens, reshape_and_cache
from halfbyte.kvcache.vllm_views import (
    dequant_nvfp4_kv_cache,
    nvfp4_kv_cache_full_dim,
    nvfp4_kv_cache_split_views,
)
from halfbyte.layouts import KVCacheDType, PageLayout

__all__ = [
    "KV_CACHE_QUANT_REGISTRY",
    "KV_SCALES_FILE",
    "NULL_PAGE",
    "STORE_BACKENDS",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "HostSequence",
    "KVCacheDType",
    "KVCacheGroup",
    "KVCachePlan",
    "KVCacheQuantMethod",
    "KVCacheSpec",
    "KVRecipe",
    "KVScales",
    "NewTokens",
    "OutOfPagesError",
    "PageAllocator",
    "PageLayout",
    "PagedKVPool",
    "SequenceTables",
    "SlidingWindowSpec",
    "dequant_nvfp4_kv_cache",
    "get_kv_cache_quant_method",
    "nvfp4_kv_cache_full_dim",
    "nvfp4_kv_cache_split_views",
    "plan_kv_cache",
    "read_tokens",
    "reshape_and_cache",
]
