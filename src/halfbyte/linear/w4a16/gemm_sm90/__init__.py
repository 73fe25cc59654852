"""W4A16 GEMM on SM90: weights are unpacked inside a `wgmma` matmul."""
