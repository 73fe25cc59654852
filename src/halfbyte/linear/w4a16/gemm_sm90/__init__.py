"""More rows of x on SM90: weights are unpacked inside a `wgmma` matmul."""
