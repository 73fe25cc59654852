"""Large M on other GPUs than SM90: weights are dequantized to 16 bits for cuBLAS."""
