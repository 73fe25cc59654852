"""Assembles a quantized layer from its tensors in the files."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import Declaration, Dialect
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.validate import check_scales
from halfbyte.linear import NvFp4Linear
from halfbyte.models.nvfp4.layer_plan import LayerPlan
from halfbyte.moe.separate_experts import PROJECTIONS, Place, SeparateExperts
from halfbyte.numerics import block_fp4
from halfbyte.numerics.e8m0 import E8M0_NAN

Sink = Callable[[torch.Tensor], None]
"""Puts a tensor from the files, already on its device, into the model."""


class ExpertSlot:
    """A projection of an expert in `SeparateExperts`, filled like an `NvFp4Linear`.

    Args:
        experts: the layer's.
        place: of the projection.
    """

    def __init__(self, experts: SeparateExperts, place: Place) -> None:
        self.experts, self.place = experts, place

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], dialect: Dialect) -> None:
        """See `SeparateExperts.load_projection`."""
        self.experts.load_projection(self.place, tensors, dialect)

    def process_weights_after_loading(self) -> None:
        """Process the layer once all of its experts are loaded."""
        if self.experts.is_complete:
            self.experts.process_weights_after_loading()

    def drop_input_scale(self) -> None:
        """Nothing to do: the layer is W4A16."""


def target_of(model: nn.Module, plan: LayerPlan, name: str) -> nn.Module | ExpertSlot:
    """What a planned layer's tensors are loaded into."""
    block = plan.block_of(name)
    experts = None if block is None else model.get_submodule(block)
    if not isinstance(experts, SeparateExperts):
        return model.get_submodule(name)
    _, expert, projection = name.rsplit(".", 2)
    return ExpertSlot(experts, (int(expert), next(p for p in PROJECTIONS if p == projection)))


class LayerSink:
    """Collects the tensors of one quantized layer, and fills the layer once it has all.

    Args:
        name: of the layer.
        module: the layer, on the meta device, or its place among experts.
        plan: contains the layer.
        declaration: of the checkpoint.
        index: of its files.
        dtype: of dequantized weights.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | ExpertSlot,
        plan: LayerPlan,
        declaration: Declaration,
        index: CheckpointIndex,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.module, self.declaration = name, module, declaration
        self.plan, self.missing = plan, set(plan.layers[name].tensors)
        self.tensors: dict[str, torch.Tensor] = {}
        self.folder, self.dtype = index.folder, dtype

    def of(self, tensor_name: str) -> Sink:
        """The sink of a tensor, by its name without the layer's."""

        def take(tensor: torch.Tensor) -> None:
            self.tensors[tensor_name] = tensor
            self.missing.discard(tensor_name)
            if not self.missing:
                self._finish()

        return take

    def _finish(self) -> None:
        tensors, self.tensors = self.tensors, {}
        if isinstance(self.module, NvFp4Linear | ExpertSlot):
            names = self.declaration.names
            if self._is_uncalibrated(tensors.get(names.input_global_scale)):
                del tensors[names.input_global_scale]
                self.plan.leave_activations(self.name)
                self.module.drop_input_scale()
            if self.plan.layers[self.name].scheme != "mxfp4":  # `SeparateMxFp4Experts` checks
                check_scales(self.folder, self.name, tensors.items(), names)
            self.module.load_tensors(tensors, self.declaration.dialect)
            self.module.process_weights_after_loading()
            return
        is_mxfp4 = self.plan.layers[self.name].scheme == "mxfp4"
        weight = self._of_mxfp4(tensors) if is_mxfp4 else self._of_fp8(tensors)
        assign(self.module, "weight", weight.to(self.dtype))
        if "bias" in tensors:
            assign(self.module, "bias", tensors["bias"].to(self.dtype))

    def _of_fp8(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 `[N, K]`."""
        scale = tensors["weight_scale"].float()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(
                f"{self.folder}: {self.name}.weight_scale: expected finite numbers above 0, found "
                f"{scale.flatten()[:4].tolist()}"
            )
        # [N] and [N, 1] scale rows; one element scales the whole weight.
        return tensors["weight"].float() * scale.reshape(-1, 1)

    def _of_mxfp4(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`[N, K]`."""
        names = self.declaration.names
        codes, scales = tensors[names.weight], tensors[names.weight_scale]
        bad = int((scales == E8M0_NAN).sum())
        if bad:
            raise CheckpointError(
                f"{self.folder}: {self.name}.{names.weight_scale}: expected finite block scales, "
                f"found {bad} NaN of {scales.numel()}"
            )
        return block_fp4.dequantize_mxfp4(codes, scales, self.dtype)

    def _is_uncalibrated(self, input_global_scale: torch.Tensor | None) -> bool:
        """Whether calibration never reached an expert: compressed-tensors then writes 1 / 0, or 1.

        An amax of exactly 2688 also gives 1; then the expert needlessly runs as W4A16.
        """
        return (
            input_global_scale is not None
            and not self.declaration.names.global_scale_is_decode
            and any(self.name.startswith(f"{block}.") for block in self.plan.experts)
            and float(input_global_scale) in (1, math.inf)
        )


def assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a buffer or parameter of a module by a tensor."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
