"""More rows of x elsewhere: weights are written out in 16 bits for cuBLAS."""
