"""Which of vLLM's MoE layers halfbyte's kernels do not support, and why."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.moe import MoeConfig, select_moe_kernel
from halfbyte.moe.registry import BACKEND_VARIABLE
from halfbyte.plugins.vllm.attention import batch_invariant
from halfbyte.plugins.vllm.moe_weights import (
    activation_of,
    format_of,
    intermediate_size_of,
    loads_biases,
    moe_config_of,
)


def reason_against(method: type, arguments: Mapping[str, Any]) -> str | None:
    """What halfbyte's kernels do not support of a layer, a noun phrase; None if they run it.

    Args:
        method: vLLM's class for the layer's format.
        arguments: of its constructor, by name.
    """
    moe = moe_config_of(arguments)
    quantization = arguments.get("quant_config")
    if getattr(quantization, "moe_activation_override", None) is not None:
        return "an activation format in --quantization-config"
    return _of_run(moe) or _of_layer(method, moe)


def _of_run(moe: Any) -> str | None:
    """vLLM's features that need another interface of kernels than `apply` of a method."""
    parallel = moe.moe_parallel_config
    if moe.is_lora_enabled:
        return "LoRA with experts"
    if parallel.enable_eplb:
        return "--enable-eplb"
    if parallel.dp_size > 1 or parallel.use_all2all_kernels:
        return "data-parallel experts"
    if parallel.pcp_size > 1:
        return "prefill context parallel with experts"
    return None


def _of_layer(method: type, moe: Any) -> str | None:
    weight_format = format_of(method)
    if moe.has_bias and not loads_biases(method):
        return "experts with biases, which vLLM does not load in this format,"
    try:
        activation = activation_of(method, moe)
        if activation is None:
            return f"the activation {moe.activation.value}"
        device_type = torch.device(moe.device).type
        config = MoeConfig(
            num_experts=moe.num_local_experts,
            hidden_size=moe.hidden_dim,
            intermediate_size=intermediate_size_of(method, moe.intermediate_size_per_partition),
            dtype=moe.in_dtype,
            weight_format=weight_format,
            has_bias=moe.has_bias,
            activation=activation,
            batch_invariant=batch_invariant(),
            device_type=device_type,
        )
        kernel = select_moe_kernel(config)
    except ValueError as error:
        return f"the layer ({error})"
    if kernel.name == "reference" and device_type != "cpu" and not os.environ.get(BACKEND_VARIABLE):
        return f"{weight_format} experts in {moe.in_dtype} on this GPU"
    return None
