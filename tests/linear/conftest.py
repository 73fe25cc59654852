"""Repacking kernels, for tests of layers."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearKernel
from halfbyte.linear.reference import ReferenceKernel


class RowsReversedKernel(ReferenceKernel):
    """A repacking kernel: reverses the rows and renames the tensors."""

    name: ClassVar[str] = "rows_reversed"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("weight", "weight_scale"):
            rows = layer.get_parameter(name).view(torch.uint8).flip(0)
            delattr(layer, name)
            layer.register_parameter(f"packed_{name}", nn.Parameter(rows, requires_grad=False))
        del layer.weight_global_scale
        setattr(layer, "weights_padding_cols", 8)  # noqa: B010 (mypy takes it for a tensor)

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scales = (layer.get_parameter(f"packed_{n}") for n in ("weight", "weight_scale"))
        return weight.flip(0), scales.flip(0).view(torch.float8_e4m3fn)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        plain = nn.Module()
        plain.weight, plain.weight_scale = (
            nn.Parameter(tensor, requires_grad=False) for tensor in self.restore_weights(layer)
        )
        plain.alpha, plain.input_global_scale = layer.alpha, layer.input_global_scale
        return super().apply_weights(plain, x, bias)


class IrreversibleKernel(RowsReversedKernel):
    """A repacking kernel that cannot restore the weights."""

    name: ClassVar[str] = "irreversible"
    restore_weights = NvFp4LinearKernel.restore_weights


@pytest.fixture
def repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that repack, by name."""
    for kernel in (RowsReversedKernel, IrreversibleKernel):
        monkeypatch.setitem(LINEAR_BACKENDS._targets, kernel.name, f"here:{kernel.__name__}")
        monkeypatch.setitem(LINEAR_BACKENDS._loaded, kernel.name, kernel)
