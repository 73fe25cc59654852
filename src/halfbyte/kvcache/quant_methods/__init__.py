"""Cache formats by name."""

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.kvcache.quant_methods.block_fp4 import FP4Block16KVCacheMethod, MXFP4KVCacheMethod
from halfbyte.kvcache.quant_methods.fp8 import Fp8KVCacheMethod
from halfbyte.kvcache.quant_methods.nvfp4 import NVFP4KVCacheMethod
from halfbyte.kvcache.quant_methods.unquantized import UnquantizedKVCacheMethod
from halfbyte.layouts import KVCacheDType

KV_CACHE_QUANT_REGISTRY: dict[str, type[KVCacheQuantMethod]] = {
    "float32": UnquantizedKVCacheMethod,
    "float16": UnquantizedKVCacheMethod,
    "bfloat16": UnquantizedKVCacheMethod,
    "fp8_e4m3": Fp8KVCacheMethod,
    "fp8_e5m2": Fp8KVCacheMethod,
    "nvfp4": NVFP4KVCacheMethod,
    "nvfp4_4over6": NVFP4KVCacheMethod,
    "fp4_block16": FP4Block16KVCacheMethod,
    "mxfp4": MXFP4KVCacheMethod,
}
"""The class of every format, which is made with the format's `KVCacheDType`."""


def get_kv_cache_quant_method(name: str | KVCacheDType) -> KVCacheQuantMethod:
    """A new instance of the method of a format's name or alias.

    Raises:
        ValueError: unknown name, or `auto`, which must be resolved first.
    """
    dtype = KVCacheDType.parse(name)
    if dtype.value not in KV_CACHE_QUANT_REGISTRY:
        valid = ", ".join(KV_CACHE_QUANT_REGISTRY)
        raise ValueError(f"KV cache method: {dtype} has none; expected one of {valid}")
    return KV_CACHE_QUANT_REGISTRY[dtype.value](dtype)


__all__ = ["KV_CACHE_QUANT_REGISTRY", "KVCacheQuantMethod", "get_kv_cache_quant_method"]
