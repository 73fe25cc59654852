"""Kernel parameters that the launchers of C++ and CUDA kernels share."""

import ctypes
from typing import Any

import torch

from halfbyte.layouts import PageLayout

REGIONS = ("k_data", "k_scale", "v_data", "v_scale")
REGION_FIELDS = tuple(f"{name}{part}" for name in REGIONS for part in ("", "_token", "_head"))
"""Names of the region fields of a block-scaled page, in the order of the C++ structs."""


def region_fields(layout: PageLayout) -> dict[str, int]:
    """Offset in the page, stride of tokens and stride of heads of each region, in bytes.

    All 0 for formats without block scales.
    """
    fields = dict.fromkeys(REGION_FIELDS, 0)
    for region in layout.regions:
        fields[region.name] = region.offset
        fields[f"{region.name}_token"] = region.token_stride
        fields[f"{region.name}_head"] = region.head_stride
    return fields


class KernelArguments:
    """A struct of kernel parameters, and the tensors that it points to.

    Args:
        struct: its type.
        numbers: fields that are no pointers.
    """

    def __init__(self, struct: type[ctypes.Structure], **numbers: float) -> None:
        self.params: Any = struct(**numbers)
        self.tensors: list[torch.Tensor] = []

    def bind(self, **tensors: torch.Tensor) -> None:
        """Point fields of the struct to tensors."""
        for name, tensor in tensors.items():
            setattr(self.params, name, tensor.data_ptr())
            self.tensors.append(tensor)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` `[..., size]` with rows aligned to 16 bytes; a copy if necessary."""
    values = 16 // x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(n % values for n in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x
