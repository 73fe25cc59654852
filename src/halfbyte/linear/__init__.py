"""4-bit matmul: linear layers with NVFP4 weights, by interchangeable kernels."""

from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from halfbyte.linear.layer import NvFp4Linear
from halfbyte.linear.registry import (
    LINEAR_BACKENDS,
    init_nvfp4_linear_kernel,
    select_nvfp4_linear_kernel,
)

__all__ = [
    "LINEAR_BACKENDS",
    "NvFp4Linear",
    "NvFp4LinearKernel",
    "NvFp4LinearLayerConfig",
    "init_nvfp4_linear_kernel",
    "select_nvfp4_linear_kernel",
]
