"""Triton kernels that are launched before the kernel in front of them has ended.

"Programmatic dependent launch" (SM90 and later): what a launch costs is paid while that kernel
still runs. Nothing is read or written before `wait_for_previous`.
"""

# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.dispatch import capability_of_gpu


@triton.jit
def wait_for_previous(overlaps: tl.constexpr):
    """Wait until all that was launched before has ended, and let the next kernel start likewise."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap_options(device: int) -> dict[str, Any]:
    """For the launch of a kernel whose constant `overlaps` says whether it does.

    Args:
        device: as `torch.Tensor.get_device` gives it, which is -1 for the CPU.
    """
    if device < 0 or torch.version.hip or capability_of_gpu(device) < 90:
        return {"overlaps": False}
    return {"overlaps": True, "launch_pdl": True}
