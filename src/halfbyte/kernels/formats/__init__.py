"""Triton device functions: encoding, decoding and matmul tiles of the cache formats."""

from halfbyte.layouts import KVCacheDType

FORMATS = frozenset(
    {
        KVCacheDType.FLOAT32,
        KVCacheDType.FLOAT16,
        KVCacheDType.BFLOAT16,
        KVCacheDType.FP8_E4M3,
        KVCacheDType.FP8_E5M2,
        KVCacheDType.NVFP4,
        KVCacheDType.NVFP4_4OVER6,
        KVCacheDType.FP4_BLOCK16,
        KVCacheDType.MXFP4,
    }
)
"""Formats that Triton kernels support; other layouts use the reference."""
