"""CUDA C++ for experts.

Few tokens per expert: the weights as loaded stream once through the registers. Many, on SM90:
`gemm_sm90`.
"""
