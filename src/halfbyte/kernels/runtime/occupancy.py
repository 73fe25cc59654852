"""How many CTAs of a kernel share an SM."""

import torch

RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for every CTA, in addition to what the kernel uses."""
_GRANULE = 128
"""Shared memory is allocated in multiples of this."""


def bytes_for_ctas(shared_bytes: int, ctas: int, device: int) -> int:
    """Dynamic shared memory with which an SM holds at most `ctas` CTAs of a kernel.

    A kernel that may start before the one in front has ended (programmatic dependent launch) gets
    SMs one by one, as they become free. If more of its CTAs fit on an SM than its grid has per SM,
    the first free SMs take too many, and the last ones get none.

    Args:
        shared_bytes: that a CTA uses.
        ctas: CTAs per SM of a grid that fills the GPU once.
        device: index of the GPU. Before SM90 launches do not overlap, and nothing is added.
    """
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9:
        return shared_bytes
    share = properties.shared_memory_per_multiprocessor // (ctas + 1) - RESERVED_BYTES
    return max(shared_bytes, (share // _GRANULE + 1) * _GRANULE)
