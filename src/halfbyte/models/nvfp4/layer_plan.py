"""Determines which layers of a model are quantized in its files, and checks the headers.

The model is built on the meta device first. `plan_layers` looks up each linear layer in the
checkpoint's declaration and compares the files' headers with the model, before anything is loaded.

Module names are the names in the files, except for fused experts, which `experts.py` unfuses if
they are quantized.
"""

import logging
from collections import Counter
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
from halfbyte.models.nvfp4.experts import fused_experts

logger = logging.getLogger("halfbyte")


@dataclass(frozen=True)
class PlannedLayer:
    """A linear layer that is quantized in the files.

    Args:
        scheme: how it is stored.
        in_features: K.
        out_features: N.
        has_bias: whether the layer has a bias in the model.
        tensors: names of its tensors in the files, without the layer's name.
    """

    scheme: Scheme
    in_features: int
    out_features: int
    has_bias: bool
    tensors: tuple[str, ...]


@dataclass
class LayerPlan:
    """The quantized layers of a model.

    Args:
        layers: by name, including those of experts.
        experts: names of modules with fused experts that the files store unfused.
        uncalibrated: layers of experts that are declared W4A4 but have no activation scale, because
            calibration never reached them. They are planned as W4A16.
    """

    layers: dict[str, PlannedLayer] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)

    def leave_activations(self, name: str) -> None:
        """Change an expert's layer to W4A16."""
        self.layers[name] = replace(self.layers[name], scheme="nvfp4-a16")
        self.uncalibrated.append(name)

    def block_of(self, name: str) -> str | None:
        """The module of fused experts that a layer belongs to; None for other layers."""
        block = name.rsplit(".", 2)[0]
        return block if block in self.experts else None

    def count(self, scheme: Scheme) -> int:
        """Number of layers with a scheme."""
        return sum(layer.scheme == scheme for layer in self.layers.values())

    def file_names(self) -> Iterator[str]:
        """Names in the files of all tensors of the layers."""
        for name, layer in self.layers.items():
            yield from (f"{name}.{tensor}" for tensor in layer.tensors)


def plan_layers(
    model: PreTrainedModel, declaration: Declaration, index: CheckpointIndex
) -> LayerPlan:
    """Plan the quantized layers of a model, checked against the headers.

    Args:
        model: on the meta device or any other; not modified.
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
        scheme = declaration.scheme_of(index.stored_module(name))
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
    for block in plan.experts:
        _check_alike(model, plan, block, index)
    if plain:
        logger.info(
            "%s: %d layers are declared quantized but stored unquantized; they stay so",
            index.folder,
            plain,
        )
    return plan


def _check_experts(model: PreTrainedModel, index: CheckpointIndex) -> None:
    """Raise CheckpointError for quantized experts that cannot be unfused here."""
    for name, module in model.named_modules():
        fused = getattr(module, "gate_up_proj", None)
        if not isinstance(fused, nn.Parameter):
            continue
        for own in ("gate_up_proj", "down_proj"):
            packed = index.tensors.get(f"{name}.{own}")
            if packed is not None and packed.dtype in PACKED:
                raise CheckpointError(
                    f"{index.folder}: {name}.{own}: expected {'/'.join(FLOATS)}, because quantized "
                    "experts of a layer packed into one tensor (as ModelOpt exports GPT-OSS in "
                    f"NVFP4) are not supported, found {packed}"
                )
        if fused_experts(module) is not None:
            continue
        for tensor, entry in index.tensors.items():
            if tensor.startswith(f"{name}.") and entry.dtype in PACKED:
                raise CheckpointError(
                    f"{index.folder}: {tensor}: expected {'/'.join(FLOATS)}, because 4-bit weights "
                    f"of {type(module).__name__} are not supported, found {entry}"
                )


def _check_alike(
    model: PreTrainedModel, plan: LayerPlan, block: str, index: CheckpointIndex
) -> None:
    """Raise CheckpointError unless the experts of a layer are stored alike.

    Only whether activations are quantized may differ: calibration may miss experts.
    """
    fused = fused_experts(model.get_submodule(block))
    assert fused is not None
    found = {
        name: _kind(plan.layers[name].scheme) if name in plan.layers else "unquantized"
        for name, _, _ in fused.layers(block)
    }
    usual = Counter(found.values()).most_common(1)[0][0]
    for name, kind in found.items():
        if kind != usual:
            raise CheckpointError(
                f"{index.folder}: {name}: expected {usual} weights, as most experts of the layer "
                f"have them (all must be stored alike), found {kind} ones"
            )


def _kind(scheme: Scheme) -> str:
    return "nvfp4" if scheme == "nvfp4-a16" else scheme


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, int, int, bool, str | None]]:
    """(name, N, K, has bias, module of its fused experts or None) of all linear layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module.out_features, module.in_features, module.bias is not None, None
        elif (fused := fused_experts(module)) is not None:
            for layer, n, k in fused.layers(name):
                yield layer, n, k, fused.has_bias, name
