"""Decode straight from packed pages, in CUDA C++ for NVIDIA GPUs from SM80."""
