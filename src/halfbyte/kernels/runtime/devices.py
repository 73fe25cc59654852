"""The current GPU, memory allocation with low host overhead, and the number of SMs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, Self

import torch

_STAY = nullcontext()
_empty_on_current_gpu: Callable[..., torch.Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)
"""The allocation of PyTorch's compiled code: half the host time of `torch.empty`."""


class Memory(NamedTuple):
    """Shape, strides and dtype of a tensor that is allocated in every call with a shape."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """A contiguous tensor."""
        return cls(shape, torch.empty(shape, device="meta").stride(), dtype)


contiguous_memory = lru_cache(maxsize=4096)(Memory.contiguous)
"""`Memory.contiguous`, cached for launchers that need it in every call."""


def allocate(memory: Memory, device: int) -> torch.Tensor:
    """An uninitialized tensor on the GPU with index `device`."""
    if _empty_on_current_gpu and device == torch._C._cuda_getDevice():
        return _empty_on_current_gpu(*memory)
    shape, stride, dtype = memory
    return torch.empty_strided(shape, stride, dtype=dtype, device=torch.device("cuda", device))


def current_device(device: int) -> AbstractContextManager[object]:
    """A context in which a GPU is the current device; cheap if it already is.

    Needed by Triton's launches and the driver's tensor maps; `nvrtc.launch` does it itself.

    Args:
        device: as `torch.Tensor.get_device` gives it, which is -1 for the CPU.
    """
    if device < 0 or device == torch._C._cuda_getDevice():
        return _STAY
    return torch.cuda.device(device)


@lru_cache(maxsize=16)
def num_sms(device: int) -> int:
    """Number of SMs of the GPU with index `device`."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def shared_bytes_of_sm(device: int) -> int:
    """Shared memory of an SM of the GPU with index `device`."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
