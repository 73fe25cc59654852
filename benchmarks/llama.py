"""Llama-3.1-8B's shape, of which benchmarks make models with random weights."""

from typing import Any

from transformers import LlamaConfig

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Fields of its `config.json`."""


def llama_8b(layers: int) -> LlamaConfig:
    """Its configuration with so many layers."""
    return LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})
