"""The GPU that a kernel is launched on."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

_STAY = nullcontext()


def current_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one; does nothing, quickly, if it is that."""
    if not tensor.is_cuda or tensor.device.index == torch._C._cuda_getDevice():
        return _STAY
    return torch.cuda.device(tensor.device)


@lru_cache(maxsize=16)
def multiprocessors(device: int) -> int:
    """How many a GPU has, given its index."""
    return torch.cuda.get_device_properties(device).multi_processor_count
