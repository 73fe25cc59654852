"""NVFP4 weights times 16-bit activations."""
