"""CUDA C++ for NVFP4 layers whose K a recipe changes (`store.cu`)."""
