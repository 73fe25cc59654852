"""Base of kernels that use the weights as loaded, their operators, and tensors by name."""

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch

from halfbyte.linear.ops import linear_op
from halfbyte.linear.tensors import matrix_of
from halfbyte.moe.base import OperatorKernel
from halfbyte.moe.experts import ExpertMatrices, GatedActivation, PackedExperts

_PARTS = ("weight", "scales", "global_scale", "bias")


class MatrixTensors(NamedTuple):
    """The tensors of an `ExpertMatrices`, contiguous, without its checks: one is made per call."""

    weight: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    bias: torch.Tensor | None


def to_tensors(experts: PackedExperts) -> dict[str, torch.Tensor]:
    """Tensors named `gate_up_weight`, `down_scales` etc.; contiguous; None is left out."""
    matrices = {"gate_up": experts.gate_up, "down": experts.down}
    found = {
        f"{name}_{part}": getattr(value, part)
        for name, value in matrices.items()
        for part in _PARTS
    }
    return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}


def from_tensors(tensors: Mapping[str, torch.Tensor], activation: GatedActivation) -> PackedExperts:
    """The inverse of `to_tensors`."""

    def matrices(name: str) -> ExpertMatrices:
        return ExpertMatrices(
            tensors[f"{name}_weight"],
            tensors[f"{name}_scales"],
            tensors.get(f"{name}_global_scale"),
            tensors.get(f"{name}_bias"),
        )

    return PackedExperts(matrices("gate_up"), matrices("down"), activation)


LayerProduct = Callable[
    [torch.Tensor, MatrixTensors, MatrixTensors, GatedActivation, torch.Tensor, torch.Tensor, bool],
    torch.Tensor,
]
"""(x `[M, H]`, gate_up, down, activation, ids, weights, batch_invariant) -> `[M, H]`, by both of
a layer's matrices; all tensors are contiguous, x aligned to 16 bytes."""


def as_loaded_op(name: str) -> Callable[[LayerProduct], Callable[..., torch.Tensor]]:
    """Make a function the operator `torch.ops.halfbyte.<name>`, which takes tensors one by one.

    Returns:
        A decorator that returns an `AsLoadedKernel.product`.
    """

    def register(product: LayerProduct) -> Callable[..., torch.Tensor]:
        @linear_op(name)
        def operator(
            x: torch.Tensor,
            topk_ids: torch.Tensor,
            topk_weights: torch.Tensor,
            gate_up_weight: torch.Tensor,
            gate_up_scales: torch.Tensor,
            gate_up_global_scale: torch.Tensor | None,
            gate_up_bias: torch.Tensor | None,
            down_weight: torch.Tensor,
            down_scales: torch.Tensor,
            down_global_scale: torch.Tensor | None,
            down_bias: torch.Tensor | None,
            alpha: float,
            limit: float | None,
            up_offset: float,
            interleaved: bool,
            n: int,
            batch_invariant: bool,
        ) -> torch.Tensor:
            if not len(x):  # also no kernel to choose, by tokens per expert
                return x.new_empty(x.shape)
            return product(
                matrix_of(x),
                MatrixTensors(gate_up_weight, gate_up_scales, gate_up_global_scale, gate_up_bias),
                MatrixTensors(down_weight, down_scales, down_global_scale, down_bias),
                GatedActivation(alpha, limit, up_offset, interleaved),
                topk_ids.contiguous(),
                topk_weights.contiguous(),
                batch_invariant,
            )

        return operator

    return register


class AsLoadedKernel(OperatorKernel):
    """Calls one operator on the tensors as loaded."""

    parts: ClassVar[tuple[str, ...]] = _PARTS

    def prepare(self, experts: PackedExperts) -> dict[str, torch.Tensor]:
        """The tensors as loaded."""
        return to_tensors(experts)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """The tensors themselves."""
        return from_tensors(tensors, self.config.activation)
