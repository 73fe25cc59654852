"""Encoding, decoding and tiles of the formats that Triton kernels know."""

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
"""Formats that they read and write; layouts of others go to the reference."""
