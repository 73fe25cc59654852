"""Grouped W4A16 GEMM on SM90 for many tokens: weights are unpacked inside a `wgmma` matmul."""
