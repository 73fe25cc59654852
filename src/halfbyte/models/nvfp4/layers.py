"""Replaces linear layers of a transformers model by quantized ones.

The model is on the meta device, and `plan_layers` has compared it with the files' headers.
`replace_layers` replaces the modules; `weight_stream` fills them.
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from halfbyte.checkpoints.dialects.base import Declaration, Scheme
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.dispatch import NoImplementationError, compute_capability_of
from halfbyte.linear import NvFp4Linear, NvFp4LinearLayerConfig, select_nvfp4_linear_kernel
from halfbyte.models.nvfp4.experts import ExpertList, fused_experts
from halfbyte.models.nvfp4.layer_plan import LayerPlan, PlannedLayer
from halfbyte.moe import NvFp4Experts
from halfbyte.moe.separate_experts import SeparateExperts
from halfbyte.moe.separate_mxfp4 import SeparateMxFp4Experts

logger = logging.getLogger("halfbyte")

_DEQUANTIZED: tuple[Scheme, ...] = ("fp8", "mxfp4")
"""Schemes of linear layers whose weights are dequantized when they are loaded."""
_NATIVE_FP4 = 100
"""Min compute capability with native FP4 x FP4 products."""


@dataclass(frozen=True)
class LayerOptions:
    """Options of quantized layers.

    Args:
        dtype: of activations, biases and results.
        device: of the loaded layers.
        linear_backend: name of a linear backend, or None to choose.
        quantize_activations: whether W4A4 layers quantize their activations; None to do so only
            with native FP4 x FP4 products.
        batch_invariant: results are bitwise independent of the batch.
        moe_backend: name of a MoE backend, or None to choose.
    """

    dtype: torch.dtype
    device: torch.device
    linear_backend: str | None = None
    quantize_activations: bool | None = None
    batch_invariant: bool = False
    moe_backend: str | None = None


def replace_layers(
    model: PreTrainedModel, plan: LayerPlan, declaration: Declaration, options: LayerOptions
) -> None:
    """Replace the layers of a plan by `NvFp4Linear`, empty and on the meta device.

    Experts of a layer become one `NvFp4Experts` or `SeparateMxFp4Experts`, or `ExpertList`, see
    `experts.py`. FP8 and MXFP4 layers stay `nn.Linear`: their weights are dequantized when they are
    loaded.

    Raises:
        ValueError: `quantize_activations` is set, and no layer has an activation scale;
            `moe_backend` is set, and no experts take it.
        CheckpointError: experts with biases whose weights are FP8, or whose activations would be
            quantized (W4A4).
    """
    if options.quantize_activations and not plan.count("nvfp4"):
        raise ValueError(
            "quantize_activations: the checkpoint has no activation scales (it is W4A16)"
        )
    chosen: dict[NvFp4LinearLayerConfig, bool] = {}
    grouped = set()
    for name in plan.experts:
        experts = _grouped_experts(model, plan, name, declaration, options, chosen)
        if experts is None:
            with torch.device("meta"):
                experts = ExpertList.like(model.get_submodule(name))
        else:
            grouped.add(name)
        model.set_submodule(name, experts)
    if options.moe_backend and not grouped:
        raise ValueError(
            f"moe_backend: got {options.moe_backend!r}, but no layer has NVFP4 experts (W4A16) or "
            "MXFP4 ones"
        )
    for name, layer in plan.layers.items():
        if layer.scheme in _DEQUANTIZED or plan.block_of(name) in grouped:
            continue
        untie(model, name)
        module = NvFp4Linear(
            layer.in_features,
            layer.out_features,
            layer.has_bias,
            quantize_activations=_quantizes_activations(layer, options, chosen),
            dtype=options.dtype,
            device="meta",
            backend=options.linear_backend,
            batch_invariant=options.batch_invariant,
            dialect=declaration.dialect,
        )
        module.layer_name = name
        model.set_submodule(name, module)


def _grouped_experts(
    model: PreTrainedModel,
    plan: LayerPlan,
    name: str,
    declaration: Declaration,
    options: LayerOptions,
    chosen: dict[NvFp4LinearLayerConfig, bool],
) -> nn.Module | None:
    """A module for fused experts in four bits; None where they run one by one."""
    fused = fused_experts(model.get_submodule(name))
    assert fused is not None
    layers = [plan.layers[layer] for layer, _, _ in fused.layers(name)]
    is_fp8 = any(layer.scheme == "fp8" for layer in layers)
    if fused.has_bias:  # GPT-OSS: cannot run as `ExpertList`, which has no biases
        if is_fp8 or (options.quantize_activations and plan.count("nvfp4")):
            raise CheckpointError(
                f"{name}: expected NVFP4 weights with unquantized activations (W4A16), the only "
                f"mode for experts with biases, found {'FP8 weights' if is_fp8 else 'W4A4'}"
            )
    elif is_fp8 or any(_quantizes_activations(layer, options, chosen) for layer in layers):
        return None
    if fused.activation is None:
        return None
    is_mxfp4 = all(layer.scheme == "mxfp4" for layer in layers)
    kind: type[SeparateExperts] = SeparateMxFp4Experts if is_mxfp4 else NvFp4Experts
    experts = kind(
        fused.num_experts,
        fused.hidden_size,
        fused.intermediate_size,
        fused.has_bias,
        activation=fused.activation,
        dtype=options.dtype,
        device="meta",
        backend=options.moe_backend,
        batch_invariant=options.batch_invariant,
        dialect=declaration.dialect,
    )
    experts.layer_name = name
    return experts


def log_activation_mode(model: nn.Module, plan: LayerPlan, options: LayerOptions) -> None:
    """Log how layers declared W4A4 run, and which weights are no longer in four bits."""
    declared = plan.count("nvfp4")
    dequantized = [name for name, layer in plan.layers.items() if layer.scheme == "mxfp4"]
    grouped = {name for name, x in model.named_modules() if isinstance(x, SeparateExperts)}
    dequantized = [name for name in dequantized if plan.block_of(name) not in grouped]
    if dequantized:
        logger.warning(
            "%s: dequantized to %s, and so are %d more MXFP4 layers: in this format only experts "
            "run in four bits",
            dequantized[0],
            str(options.dtype).removeprefix("torch."),
            len(dequantized) - 1,
        )
    layers = [module for module in model.modules() if isinstance(module, NvFp4Linear)]
    quantized = sum(layer.quantize_activations for layer in layers)
    if plan.uncalibrated:
        logger.warning(
            "%s: no activation scale, because the expert got no calibration tokens; it and %d "
            "more layers of experts run as W4A16",
            plan.uncalibrated[0],
            len(plan.uncalibrated) - 1,
        )
    if quantized:
        logger.info("%d of %d W4A4 layers quantize their activations", quantized, declared)
    if quantized < declared:
        requested = options.quantize_activations is False
        logger.warning(
            "%d of %d W4A4 layers run as W4A16, their activations unquantized (%s)",
            declared - quantized,
            declared,
            "as requested"
            if requested
            else "no native FP4 here; quantize_activations=True emulates it",
        )


def untie(model: PreTrainedModel, name: str) -> None:
    """Untie a layer that has its own weights in the files."""
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        model.config.tie_word_embeddings = False


def _quantizes_activations(
    layer: PlannedLayer, options: LayerOptions, chosen: dict[NvFp4LinearLayerConfig, bool]
) -> bool:
    """Whether a layer runs as W4A4: if requested, or by default if a native kernel would run it."""
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
            config, options.linear_backend
        )
    return chosen[config]


def _is_native(config: NvFp4LinearLayerConfig, backend: str | None) -> bool:
    try:
        return select_nvfp4_linear_kernel(config, backend).name != "reference"
    except NoImplementationError:
        return False
