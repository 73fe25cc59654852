"""Programmatic dependent launch of Triton kernels (SM90 and later).

A kernel is launched while the previous one still runs, which hides the launch latency. It must not
read or write memory before `wait_for_previous`.
"""

# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.dispatch import compute_capability_of_gpu


@triton.jit
def wait_for_previous(overlaps: tl.constexpr):
    """Wait until the previous kernels have ended, and let the next kernel launch."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap_options(device: int) -> dict[str, Any]:
    """Launch options of a kernel with a constexpr `overlaps`.

    Args:
        device: as `torch.Tensor.get_device` gives it, which is -1 for the CPU.
    """
    if device < 0 or torch.version.hip or compute_capability_of_gpu(device) < 90:
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
