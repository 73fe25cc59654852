"""Quantized layers put in place of a transformers model's own.

A model is built first, on the meta device. `plan_layers` walks over its linear layers, asks the
checkpoint's declaration how each is stored, and compares the headers of the files with what the
model needs; nothing has been loaded when that fails. `put_in_place` then exchanges the modules.

Names of modules are names in the files, with one exception: the fused experts of mixtures, which
`experts.py` takes apart where they are quantized.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
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
from halfbyte.dispatch import NoImplementationError, compute_capability_of
from halfbyte.linear import NvFp4Linear, NvFp4LinearLayerConfig, select_nvfp4_linear_kernel
from halfbyte.models.nvfp4.experts import Experts, has_fused_experts

logger = logging.getLogger("halfbyte")

_NATIVE_FP4 = 100
"""Compute capability from which GPUs multiply FP4 by FP4 themselves."""


@dataclass(frozen=True)
class LayerOptions:
    """How quantized layers are to run.

    Args:
        dtype: of activations, biases and results.
        device: where they will be.
        backend: name of a linear backend, or None to choose.
        quantize_activations: whether W4A4 layers quantize their activations; None for where the
            machine multiplies FP4 by FP4 itself.
        batch_invariant: a row's result is bitwise the same whatever else is in the batch.
    """

    dtype: torch.dtype
    device: torch.device
    backend: str | None = None
    quantize_activations: bool | None = None
    batch_invariant: bool = False


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


def put_in_place(
    model: PreTrainedModel, plan: LayerPlan, declaration: Declaration, options: LayerOptions
) -> None:
    """Exchange the layers of a plan for `NvFp4Linear`, empty and on the meta device.

    FP8 layers stay `nn.Linear`: their weights are dequantized when they are loaded.

    Raises:
        ValueError: activations are to be quantized, and no layer has a scale for them.
    """
    if options.quantize_activations and not plan.count("nvfp4"):
        raise ValueError(
            "quantize_activations: the checkpoint has no activation scales (it is W4A16)"
        )
    for name in plan.experts:
        with torch.device("meta"):
            model.set_submodule(name, Experts.like(model.get_submodule(name)))
    chosen: dict[NvFp4LinearLayerConfig, bool] = {}
    for name, layer in plan.layers.items():
        if layer.scheme == "fp8":
            continue
        untie(model, name)
        module = NvFp4Linear(
            layer.in_features,
            layer.out_features,
            layer.has_bias,
            quantize_activations=_quantizes_activations(layer, options, chosen),
            dtype=options.dtype,
            device="meta",
            backend=options.backend,
            batch_invariant=options.batch_invariant,
            dialect=declaration.dialect,
        )
        module.layer_name = name
        model.set_submodule(name, module)


def say_activations(model: nn.Module, plan: LayerPlan, options: LayerOptions) -> None:
    """Log how the layers run that are declared W4A4."""
    declared = plan.count("nvfp4")
    layers = [module for module in model.modules() if isinstance(module, NvFp4Linear)]
    quantized = sum(layer.quantize_activations for layer in layers)
    if plan.uncalibrated:
        logger.warning(
            "%s: no activation scale, because calibration never reached the expert; it and %d "
            "more layers of experts run as W4A16",
            plan.uncalibrated[0],
            len(plan.uncalibrated) - 1,
        )
    if quantized:
        logger.info("%d of %d W4A4 layers quantize their activations", quantized, declared)
    if quantized < declared:
        asked = options.quantize_activations is False
        logger.warning(
            "%d of %d W4A4 layers run as W4A16, their activations unquantized (%s)",
            declared - quantized,
            declared,
            "as asked for"
            if asked
            else "no native FP4 here; quantize_activations=True emulates it",
        )


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


def untie(model: PreTrainedModel, name: str) -> None:
    """Let a layer that has weights of its own in the files keep them."""
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        model.config.tie_word_embeddings = False


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


def _quantizes_activations(
    layer: PlannedLayer, options: LayerOptions, chosen: dict[NvFp4LinearLayerConfig, bool]
) -> bool:
    """Whether a layer runs as W4A4: if asked for, else if a native kernel would run it."""
    if layer.scheme != "nvfp4" or options.quantize_activations is not None:
        return layer.scheme == "nvfp4" and bool(options.quantize_activations)
    config = NvFp4LinearLayerConfig(
        n=layer.out_features,
        k=layer.in_features,
        dtype=options.dtype,
        has_bias=layer.has_bias,
        quantize_activations=True,
        batch_invariant=options.batch_invariant,
        device_type=options.device.type,
        compute_capability=compute_capability_of(options.device),
    )
    if config not in chosen:
        chosen[config] = config.compute_capability >= _NATIVE_FP4 and _is_native(
            config, options.backend
        )
    return chosen[config]


def _is_native(config: NvFp4LinearLayerConfig, backend: str | None) -> bool:
    try:
        return select_nvfp4_linear_kernel(config, backend).name != "reference"
    except NoImplementationError:
        return False
