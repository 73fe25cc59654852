"""What the operators share: checks of tensors, and kernels for the dtypes that these take."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.operators import make_operator
from halfbyte.kernels.runtime.parameters import aligned

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels take."""


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operator `torch.ops.halfbyte.<name>`."""
    return partial(make_operator, name, fake=fake)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as rows of one stride, aligned to 16 bytes; a copy if necessary."""
    return aligned(x.flatten(0, -2))


def suits(x: torch.Tensor) -> bool:
    """Whether the kernels take a tensor."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and x.shape[-1] % 8 == 0


@lru_cache(maxsize=256)
def load_kernel(name: str, macros: tuple[tuple[str, int], ...], device: int) -> nvrtc.Kernel:
    """`NAME.cu`, compiled for these macros."""
    return nvrtc.load(f"elementwise/{name}.cu", macros, ((name, 0),), device)[name]


def macros_of(dtype: torch.dtype, **more: int) -> tuple[tuple[str, int], ...]:
    """Macros of a kernel for values of a dtype."""
    return (("X_BF16", int(dtype == torch.bfloat16)), *more.items())


def expect(name: str, x: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Raise ValueError for another shape, or another device than that of `like`."""
    if tuple(x.shape) != shape or x.device != like.device:
        raise ValueError(
            f"{name}: expected {list(shape)} on {like.device}, got {list(x.shape)} on {x.device}"
        )


def normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension, in PyTorch; float32."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
