"""Reads vLLM's MoE layers: formats, activations, and loaded parameters as `PackedExperts`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfbyte.linear.dialect_tensors import StoredGlobalScale
from halfbyte.moe import GPT_OSS, ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.experts import BLOCK_SIZES, WeightFormat
from halfbyte.plugins.vllm.linear_kernel import sane_scales
from halfbyte.plugins.vllm.unloaded import codes_of

GPT_OSS_METHOD = "GptOssMxfp4MoEMethod"
"""vLLM's class for GPT-OSS's own files."""


def moe_config_of(arguments: Mapping[str, Any]) -> Any:
    """vLLM's `FusedMoEConfig` among a method constructor's arguments."""
    return arguments["moe" if "moe" in arguments else "moe_config"]


def format_of(method: type) -> WeightFormat:
    """The weights' format of vLLM's method class."""
    return "mxfp4" if "mxfp4" in method.__name__.lower() else "nvfp4"


def loads_biases(method: type) -> bool:
    """Whether vLLM's method class creates parameters for biases, if a layer has them."""
    return method.__name__ == GPT_OSS_METHOD


def intermediate_size_of(method: type, per_rank: int) -> int:
    """I of a rank as loaded.

    GPT-OSS's loader distributes whole blocks over the ranks, and the last ranks may get fewer: they
    are padded with zeros, which add nothing.

    Args:
        method: vLLM's class.
        per_rank: the intermediate size divided by the number of ranks.
    """
    block = BLOCK_SIZES["mxfp4"]
    return -(-per_rank // block) * block if method.__name__ == GPT_OSS_METHOD else per_rank


def activation_of(method: type, moe: Any) -> GatedActivation | None:
    """The activation of a layer; None for one that halfbyte's kernels do not have.

    Args:
        method: vLLM's class.
        moe: vLLM's `FusedMoEConfig`.

    Raises:
        ValueError: a limit that is not positive.
    """
    name = moe.activation.value
    if name == "silu":
        return GatedActivation(limit=moe.swiglu_limit)
    if name == "swigluoai" and method.__name__ == GPT_OSS_METHOD:
        return GPT_OSS
    if name == "swigluoai_uninterleave" and moe.swiglu_limit is not None:
        alpha = 1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha
        return GatedActivation(alpha, moe.swiglu_limit, moe.swiglu_beta or 0.0)
    return None


def packed_experts(method: type, moe: Any, layer: Any, is_dummy: bool) -> PackedExperts:
    """The experts that vLLM loaded to a layer of this rank, with all global scales as loaded.

    Args:
        method: vLLM's class for the layer's format.
        moe: vLLM's `FusedMoEConfig`.
        layer: vLLM's `RoutedExperts`.
        is_dummy: whether the weights are random (`--load-format dummy`).
    """
    activation = activation_of(method, moe)
    assert activation is not None
    read = _read_mxfp4 if format_of(method) == "mxfp4" else _read_nvfp4
    gate_up, down = (read(layer, name, is_dummy) for name in ("w13", "w2"))
    if not moe.has_bias:
        return PackedExperts(gate_up, down, activation)
    gate_up = replace(gate_up, bias=layer.w13_bias.data)
    # vLLM loads the bias on one rank and zeros on the others, because it sums the ranks' results.
    down = replace(down, bias=layer.w2_bias.data)
    return PackedExperts(gate_up, down, activation)


def parameters_of(layer: Any) -> list[str]:
    """Names of the parameters that vLLM created for the experts."""
    return [name for name in layer._parameters if name.startswith(("w13_", "w2_"))]


def _read_mxfp4(layer: Any, name: str, is_dummy: bool) -> ExpertMatrices:
    scales = getattr(layer, f"{name}_weight_scale").data
    if is_dummy:  # exponents of -15 to 0
        scales = 0x70 + scales % 0x10
    return ExpertMatrices(codes_of(layer, name), scales)


def _read_nvfp4(layer: Any, name: str, is_dummy: bool) -> ExpertMatrices:
    scales = getattr(layer, f"{name}_weight_scale").data
    decode = getattr(layer, f"{name}_weight_scale_2", None)
    stored = getattr(layer, f"{name}_weight_global_scale") if decode is None else decode
    # On the CPU: comparing scalars must not sync the GPU.
    values = StoredGlobalScale(stored.data.float().cpu().reshape(-1), decode is not None)
    global_scale = values.decode_weights().reshape(stored.shape[0], -1).to(scales.device)
    if is_dummy:
        scales, global_scale = sane_scales(scales, global_scale)
    return ExpertMatrices(codes_of(layer, name), scales, global_scale)
