"""Tensors of a layer by name, for kernels that use the weights as loaded."""

from collections.abc import Mapping

import torch

from halfbyte.moe.experts import ExpertMatrices, GatedActivation, PackedExperts

_PARTS = ("weight", "scales", "global_scale", "bias")


def to_tensors(experts: PackedExperts) -> dict[str, torch.Tensor]:
    """`gate_up_weight`, `down_scales` and so on; contiguous, without those that are None."""
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
