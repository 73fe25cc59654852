"""Which layers of a model are quantized in its files, compared with the headers.

A model is built first, on the meta device. `plan_layers` walks over its linear layers, asks the
checkpoint's declaration how each is stored, and compares the headers of the files with what the
model needs; nothing has been loaded when that fails.

Names of modules are names in the files, with one exception: the fused experts of mixtures, which
`experts.py` takes apart where they are quantized.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn
from transformers import PreTrainedModel

from halfbyte.checkpoints.dialects.base import Declaration, Scheme
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.validate import (
    FLOATS,
    PACKED,
    check_layer,
    check_unquantized_layer,
    is_plain,
)
from halfbyte.models.nvfp4.experts import has_fused_experts

logger = logging.getLogger("halfbyte")


@dataclass(frozen=True)
class PlannedLayer:
    """A linear layer that is quantized in the files.

    Args:
        scheme: how it is stored.
        in_features: K.
        out_features: N.
        has_bias: whether the model has a bias there.
        tensors: names of its tensors in the files, without its own.
    """

    scheme: Scheme
    in_features: int
    out_features: int
    has_bias: bool
    tensors: tuple[str, ...]


@dataclass
class LayerPlan:
    """What is quantized in a model's files.

    Args:
        layers: by name; those of experts included.
        experts: names of the modules that hold fused experts which the files do not.
        uncalibrated: layers of experts that are declared W4A4 and, because calibration never
            reached them, have no activation scale. They are planned as W4A16.
    """

    layers: dict[str, PlannedLayer] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)

    def leave_activations(self, name: str) -> None:
        """Plan an expert's layer as W4A16 after all."""
        self.layers[name] = replace(self.layers[name], scheme="nvfp4-a16")
        self.uncalibrated.append(name)

    def count(self, scheme: Scheme) -> int:
        """Layers of a scheme."""
        return sum(layer.scheme == scheme for layer in self.layers.values())

    def file_names(self) -> Iterator[str]:
        """Names of all the tensors in the files that the layers consist of."""
        for name, layer in self.layers.items():
            yield from (f"{name}.{tensor}" for tensor in layer.tensors)


def plan_layers(
    model: PreTrainedModel, declaration: Declaration, index: CheckpointIndex
) -> LayerPlan:
    """Which layers of a model are quantized in its files, checked against the headers.

    Args:
        model: on the meta device or any other; it is left as it is.
        declaration: of the checkpoint.
        index: of its files.

    Raises:
        CheckpointError: a quantized layer's tensor is absent or does not fit.
    """
    plan = LayerPlan()
    _check_experts(model, index)
    tied = {name.removesuffix(".weight") for name in model.all_tied_weights_keys}
    plain = 0
    for name, n, k, has_bias, block in _linear_layers(model):
        scheme = declaration.scheme_of(name)
        is_fused = block is not None and f"{block}.gate_up_proj" in index
        if is_fused or (name in tied and not index.names_of(name)):
            continue
        if scheme is None:
            check_unquantized_layer(index, name, n, k, declaration.names)
            continue
        if is_plain(index, name, n, k, declaration.names):
            plain += 1
            continue
        input_scale = f"{name}.{declaration.names.input_global_scale}"
        if scheme == "nvfp4" and input_scale not in index:
            if declaration.leaves_activations:
                scheme = "nvfp4-a16"
            elif block is not None:
                scheme = "nvfp4-a16"
                plan.uncalibrated.append(name)
        tensors = check_layer(index, declaration, name, scheme, n, k, has_bias=has_bias)
        plan.layers[name] = PlannedLayer(scheme, k, n, has_bias, tensors)
        if block is not None and block not in plan.experts:
            plan.experts.append(block)
    if plain:
        logger.info(
            "%s: %d layers are declared quantized but stored unquantized; they stay so",
            index.folder,
            plain,
        )
    return plan


def _check_experts(model: PreTrainedModel, index: CheckpointIndex) -> None:
    """Raise CheckpointError for quantized experts of a kind that is not taken apart here."""
    for name, module in model.named_modules():
        fused = getattr(module, "gate_up_proj", None)
        if not isinstance(fused, nn.Parameter) or has_fused_experts(module):
            continue
        for tensor, entry in index.tensors.items():
            if tensor.startswith(f"{name}.") and entry.dtype in PACKED:
                raise CheckpointError(
                    f"{index.folder}: {tensor}: expected {'/'.join(FLOATS)}, as experts with "
                    f"biases ({type(module).__name__}) are not read in four bits, found {entry}"
                )


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, int, int, bool, str | None]]:
    """(name, N, K, has bias, module of fused experts that it is part of) of all linear layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module.out_features, module.in_features, module.bias is not None, None
        elif has_fused_experts(module):
            num_experts, both, hidden_size = module.get_parameter("gate_up_proj").shape
            for i in range(num_experts):
                yield f"{name}.{i}.gate_proj", both // 2, hidden_size, False, name
                yield f"{name}.{i}.up_proj", both // 2, hidden_size, False, name
                yield f"{name}.{i}.down_proj", hidden_size, both // 2, False, name
