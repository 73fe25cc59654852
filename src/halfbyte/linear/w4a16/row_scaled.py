"""Base of halfbyte's own W4A16 kernels: codes, block scales and a global scale per row of W."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from halfbyte.linear.base import NvFp4LinearKernel
from halfbyte.linear.tensors import set_tensor, tensor_of


class RowScaledKernel(NvFp4LinearKernel):
    """Calls one operator on `weight`, `weight_scale` (in any order) and `weight_row_scale`."""

    product: ClassVar[Callable[..., torch.Tensor]]
    """The operator: (x, the three tensors, bias, n, batch_invariant) -> `[..., n]`."""

    def set_row_scales(self, layer: nn.Module) -> None:
        """Give every row the global scale of its part: `weight_row_scale`, float32 `[n]`."""
        scales = tensor_of(layer, "alpha")
        sizes = torch.tensor(self.config.part_sizes or (self.config.n,), device=scales.device)
        set_tensor(layer, "weight_row_scale", scales.repeat_interleave(sizes))

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `NvFp4LinearKernel.apply_weights`."""
        tensors, config = layer._parameters, self.config  # faster than `layer.weight`
        return type(self).product(
            x,
            tensors["weight"],
            tensors["weight_scale"],
            tensors["weight_row_scale"],
            bias,
            config.n,
            config.batch_invariant,
        )
