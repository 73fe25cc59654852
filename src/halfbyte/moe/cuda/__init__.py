"""CUDA C++ for experts.

Few tokens per expert: the weights, packed at load, stream once through the registers. Many, on
SM90: `gemm_sm90`.
"""
