"""MoE layers of vLLM: made for given ranks, loaded as by vLLM's loader, and run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, KernelConfig, LoadConfig, LoRAConfig, VllmConfig
from vllm.config import set_current_vllm_config as in_config
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from halfbyte.moe import GPT_OSS, PackedExperts
from moe.cases import random_experts

E, H, I = 5, 64, 96  # noqa: E741
ON = {"halfbyte": {"moe": "on"}}
make_moe = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
"""vLLM's function, by its names in vLLM 0.32 and 0.24."""


@contextmanager
def ranks_of(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> Iterator[None]:
    """Make layers for given ranks, without other processes."""
    alone = FusedMoEParallelConfig.make_no_parallel()
    with monkeypatch.context() as patch:
        found = replace(alone, **sizes)
        patch.setattr(FusedMoEParallelConfig, "make", staticmethod(lambda *_, **__: found))
        yield


def make_layer(*args: Any, **options: Any) -> Any:
    """The routed experts of `make_runner`."""
    return make_runner(*args, **options).routed_experts


def make_runner(
    additional_config: Any = ON,
    backend: AttentionBackendEnum | None = AttentionBackendEnum.CUSTOM,
    **options: Any,
) -> Any:
    """vLLM's runner of a MoE layer, with parameters that are not loaded yet.

    Args:
        additional_config: vLLM's.
        backend: of attention.
        options: `lora`, `load_format`, `moe_backend`, `device`, or arguments of vLLM's function.
    """
    device = torch.device(options.pop("device", "cpu"))
    kernels = KernelConfig(moe_backend=options.pop("moe_backend", "auto"))
    load_config = LoadConfig(load_format=options.pop("load_format", "auto"))
    lora = LoRAConfig() if options.pop("lora", False) else None
    config = VllmConfig(
        additional_config=additional_config,
        attention_config=AttentionConfig(backend=backend),
        load_config=load_config,
        kernel_config=kernels,
    )
    config.lora_config = lora
    config.device_config.device = device
    defaults = {
        "num_experts": E,
        "top_k": 2,
        "hidden_size": H,
        "intermediate_size": I,
        "params_dtype": torch.float32,
        "quant_config": ModelOptNvFp4Config("W4A16_NVFP4", True, None, [], 16),
        "prefix": "model.layers.0.mlp.experts",
    }
    parallel = {"tp_size": 1, "dp_size": 1, "pcp_size": 1}
    with in_config(config), device:
        return make_moe(**{**defaults, **parallel, **options})


def load(
    layer: Any,
    experts: PackedExperts,
    is_loaded: Callable[[int, str, str], bool] = lambda *_: True,
    change: Callable[[], None] = lambda: None,
) -> None:
    """Load with vLLM's loader, which slices each tensor for this rank.

    Args:
        is_loaded: whether a tensor is there, by expert, shard and name.
        change: called between loading and processing.
    """
    half = experts.intermediate_size
    for expert in range(experts.num_experts):
        for shard, matrices, rows, part in (
            ("w1", experts.gate_up, slice(0, half), 0),
            ("w3", experts.gate_up, slice(half, 2 * half), 1),
            ("w2", experts.down, slice(None), 0),
        ):
            name = "w2" if shard == "w2" else "w13"
            assert matrices.global_scale is not None
            for suffix, tensor in (
                ("weight", matrices.weight[expert, rows]),
                ("weight_scale", matrices.scales[expert, rows]),
                ("weight_scale_2", matrices.global_scale[expert, part]),
            ):
                if not is_loaded(expert, shard, suffix):
                    continue
                parameter = getattr(layer, f"{name}_{suffix}")
                layer.weight_loader(parameter, tensor, f"{name}_{suffix}", shard, expert)
    change()
    layer.quant_method.process_weights_after_loading(layer)


def run(layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer.quant_method.apply(layer, x, weights, ids, None, None)
    return result


def make_gpt_oss(**options: Any) -> Any:
    """A layer for GPT-OSS's own files, which have one tensor for all experts."""
    config = GptOssMxfp4Config()
    return make_layer(quant_config=config, has_bias=True, activation="swigluoai", **options)


def load_gpt_oss(layer: Any, experts: PackedExperts, rank: int, **changed: Any) -> None:
    """Load what vLLM's loader of the model gives to a rank, which has blocks of 32 features.

    Args:
        changed: other tensors by parameter name; None for a tensor that is missing.
    """
    gate_up, down, size = experts.gate_up, experts.down, layer.w2_weight.shape[2] * 2
    features = slice(rank * size, (rank + 1) * size)
    rows = slice(2 * features.start, 2 * features.stop)
    assert gate_up.bias is not None
    assert down.bias is not None
    tensors: dict[str, Any] = {
        "w13_weight": gate_up.weight[:, rows],
        "w13_weight_scale": gate_up.scales[:, rows],
        "w13_bias": gate_up.bias[:, rows],
        "w2_weight": down.weight[..., features.start // 2 : features.stop // 2],
        "w2_weight_scale": down.scales[..., features.start // 32 : features.stop // 32],
        "w2_bias": down.bias if rank == 0 else torch.zeros_like(down.bias),
    }
    for name, tensor in {**tensors, **changed}.items():
        if tensor is not None:
            layer.weight_loader(getattr(layer, name), tensor, name, None, None)
    layer.quant_method.process_weights_after_loading(layer)


def gpt_oss_experts() -> PackedExperts:
    """Biases are bfloat16 values, as vLLM keeps them."""
    options: Any = {"weight_format": "mxfp4", "activation": GPT_OSS, "dtype": torch.bfloat16}
    return random_experts(E, H, I, bias=True, **options)
