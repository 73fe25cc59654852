"""The GPU that a kernel is launched on, and memory there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, Self

import torch

_STAY = nullcontext()
_empty_on_current_gpu: Callable[..., torch.Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)
"""Of PyTorch's compiled code: takes half of the host's time that `torch.empty` does."""


class Memory(NamedTuple):
    """A tensor that every call with a shape allocates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """One row after the other."""
        return cls(shape, torch.empty(shape, device="meta").stride(), dtype)


def allocate(memory: Memory, device: int) -> torch.Tensor:
    """A tensor on a GPU, given its index; nothing is written to it."""
    if _empty_on_current_gpu and device == torch._C._cuda_getDevice():
        return _empty_on_current_gpu(*memory)
    shape, stride, dtype = memory
    return torch.empty_strided(shape, stride, dtype=dtype, device=torch.device("cuda", device))


def current_device(device: int) -> AbstractContextManager[object]:
    """Make a GPU the current one; does nothing, quickly, if it is that.

    Triton's launches and the driver's tensor maps need it; `nvrtc.launch` sees to it itself.

    Args:
        device: as `torch.Tensor.get_device` gives it, which is -1 for the CPU.
    """
    if device < 0 or device == torch._C._cuda_getDevice():
        return _STAY
    return torch.cuda.device(device)


@lru_cache(maxsize=16)
def num_sms(device: int) -> int:
    """How many a GPU has, given its index."""
    return torch.cuda.get_device_properties(device).multi_processor_count
