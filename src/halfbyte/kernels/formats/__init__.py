"""Encoding, decoding and tiles of every format, for Triton kernels."""
