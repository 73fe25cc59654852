"""Small random models of every supported architecture."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": 11}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": 13,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "layer_types": _MIXED,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {"head_dim": 32, "sliding_window": 9, "layer_types": _MIXED},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 32,
            "sliding_window": 10,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _MIXED,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 32, **_MOE}),
    "qwen2_moe": (Qwen2MoeConfig, {"shared_expert_intermediate_size": 32, **_MOE}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": (Phi3Config, {}),
    "granite": (GraniteConfig, {"attention_multiplier": 0.2}),
    "olmo2": (Olmo2Config, {}),
}

ARCHITECTURES = tuple(_CONFIGS)
ALL_EXPERTS = {
    name: {"num_experts_per_tok": 4} for name in ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
}
"""Overrides with which every token has all experts, so that rounding cannot change the choice."""


def make_model(architecture: str, dtype: torch.dtype = torch.float32, **overrides: object) -> Any:
    """A random model with eager attention; weights large enough that attention matters."""
    config_class, fields = _CONFIGS[architecture]
    config = config_class(**{**_COMMON, **fields, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=1.5)  # their initial values (~0.02) would hide a bug
            elif parameter.dim() >= 2:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids, none of them the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, _COMMON["vocab_size"], shape, generator=generator)
