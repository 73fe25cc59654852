"""Quantized layers put in place of a transformers model's own.

The model stands on the meta device, and `plan_layers` has compared the headers of the files with
it. `put_in_place` exchanges the modules; `weight_stream` fills them.
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.dispatch import NoImplementationError, compute_capability_of
from halfbyte.linear import NvFp4Linear, NvFp4LinearLayerConfig, select_nvfp4_linear_kernel
from halfbyte.models.nvfp4.experts import Experts
from halfbyte.models.nvfp4.layer_plan import LayerPlan, PlannedLayer

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


def log_activation_mode(model: nn.Module, plan: LayerPlan, options: LayerOptions) -> None:
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


def untie(model: PreTrainedModel, name: str) -> None:
    """Let a layer that has weights of its own in the files keep them."""
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        model.config.tie_word_embeddings = False


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
