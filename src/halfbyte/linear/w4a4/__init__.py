"""NVFP4 weights times NVFP4 activations, by libraries for Blackwell."""
