"""Attention of many queries: packed pages are unpacked once, then dense kernels attend."""
