"""Triton device functions: encoding, decoding and matmul tiles of the cache formats."""

from halfbyte.layouts import KVCacheDType

FORMATS = frozenset(KVCacheDType.where(lambda row: row.triton_kind))
"""Formats that Triton kernels support; other layouts use the reference."""
