"""From the tensors of a file to a quantized layer that is ready to run."""

import math
from collections.abc import Callable

import torch
from torch import nn

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.validate import check_scales
from halfbyte.linear import NvFp4Linear
from halfbyte.models.nvfp4.layer_plan import LayerPlan

Sink = Callable[[torch.Tensor], None]
"""Takes a tensor of the files, on its device, to its place in the model."""


class LayerSink:
    """Takes the tensors of one quantized layer, and fills it when all are there.

    Args:
        name: of the layer.
        module: the layer, on the meta device.
        plan: with the layer in it.
        declaration: of the checkpoint.
        index: of its files.
        dtype: of weights that are dequantized.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
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
        """What takes a tensor; its name without the layer's."""

        def take(tensor: torch.Tensor) -> None:
            self.tensors[tensor_name] = tensor
            self.missing.discard(tensor_name)
            if not self.missing:
                self._finish()

        return take

    def _finish(self) -> None:
        tensors, self.tensors = self.tensors, {}
        if isinstance(self.module, NvFp4Linear):
            names = self.declaration.names
            if self._is_uncalibrated(tensors.get(names.input_global_scale)):
                del tensors[names.input_global_scale]
                self.plan.leave_activations(self.name)
                self.module.drop_input_scale()
            check_scales(self.folder, self.name, tensors.items(), names)
            self.module.load_tensors(tensors, self.declaration.dialect)
            self.module.process_weights_after_loading()
            return
        scale = tensors["weight_scale"].float()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(
                f"{self.folder}: {self.name}.weight_scale: expected finite numbers above 0, found "
                f"{scale.flatten()[:4].tolist()}"
            )
        # [N] and [N, 1] scale rows, one element all.
        weight = tensors["weight"].float() * scale.reshape(-1, 1)
        assign(self.module, "weight", weight.to(self.dtype))
        if "bias" in tensors:
            assign(self.module, "bias", tensors["bias"].to(self.dtype))

    def _is_uncalibrated(self, input_global_scale: torch.Tensor | None) -> bool:
        """Of an expert that calibration never reached, compressed-tensors writes 1 / 0, or 1.

        So would 2688 as the largest magnitude; what it then costs is that an expert's activations
        are left alone.
        """
        return (
            input_global_scale is not None
            and not self.declaration.names.global_scale_is_decode
            and any(self.name.startswith(f"{block}.") for block in self.plan.experts)
            and float(input_global_scale) in (1, math.inf)
        )


def assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of a module's own buffer or parameter."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
