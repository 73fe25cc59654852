"""CUDA sources on the CPU: see `build`."""

from cuda_on_host.build import (
    allocate,
    build,
    guarded,
    launch,
    overlapping_kernels,
    tensor_maps_on_host,
)
from cuda_on_host.compiler import needs_compiler

__all__ = [
    "allocate",
    "build",
    "guarded",
    "launch",
    "needs_compiler",
    "overlapping_kernels",
    "tensor_maps_on_host",
]
