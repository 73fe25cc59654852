"""Models with dummy weights that `vllm_step` and `vllm_online` run, and their variants."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.llama import LLAMA_8B

Case = tuple[int, int]
"""Batch and context."""


class Variant(NamedTuple):
    """One way to run a model in vLLM."""

    four_bit_weights: bool
    options: dict[str, Any]
    """Arguments of `vllm.LLM`."""


class Model(NamedTuple):
    """A shape, the declaration of its weights in 4 bits, and what is measured."""

    config: dict[str, Any]
    """Fields of `config.json`, without `quantization_config`."""
    quantization: dict[str, Any]
    """`quantization_config` of variants with 4-bit weights."""
    variants: dict[str, Variant]
    cases: tuple[Case, ...]

    def write(self, folder: Path, four_bit_weights: bool) -> None:
        """Write `config.json`, all that vLLM needs of a model with dummy weights."""
        fields = dict(self.config)
        if four_bit_weights:
            fields["quantization_config"] = self.quantization
        (folder / "config.json").write_text(json.dumps(fields))


def halfbyte(kv_recipe: str = "plain", **more: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for halfbyte's cache.

    Args:
        kv_recipe: of the cache.
        more: further options of halfbyte's section.
    """
    return {
        "attention_backend": "CUSTOM",
        "kv_cache_dtype": "nvfp4",
        "additional_config": {"halfbyte": {"kv_recipe": kv_recipe, **more}},
    }


FP8_CACHE = {"kv_cache_dtype": "fp8"}
_NVFP4_WEIGHTS = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "kv_cache_quant_algo": None,
    "group_size": 16,
}
_COMMON = {"torch_dtype": "bfloat16", "attention_bias": False, "tie_word_embeddings": False}


def _without(*names: str) -> dict[str, Any]:
    """ModelOpt's declaration of NVFP4 weights in all layers but these."""
    return {**_NVFP4_WEIGHTS, "exclude_modules": list(names), "ignore": list(names)}


LLAMA = Model(
    config={
        **LLAMA_8B,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    quantization=_without("lm_head"),
    variants={
        "vllm bf16": Variant(False, {}),
        "vllm fp8 cache": Variant(False, FP8_CACHE),
        "vllm nvfp4 weights, fp8 cache": Variant(True, FP8_CACHE),
        "halfbyte nvfp4 cache": Variant(False, halfbyte()),
        "halfbyte nvfp4 weights and cache": Variant(True, halfbyte()),
        "halfbyte nvfp4 weights and cache, balanced": Variant(True, halfbyte("balanced")),
    },
    cases=((64, 8192), (128, 2048), (16, 1024), (1, 4096)),
)

QWEN3_MOE = Model(
    config={
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    quantization=_without("lm_head", "*.mlp.gate"),
    variants={
        "vllm bf16": Variant(False, {}),
        "vllm nvfp4 weights, fp8 cache": Variant(True, FP8_CACHE),
        "halfbyte nvfp4 weights and cache, vllm experts": Variant(True, halfbyte(moe="off")),
        "halfbyte nvfp4 weights and cache": Variant(True, halfbyte(moe="on")),
    },
    cases=((64, 4096), (128, 1024), (16, 1024), (1, 2048)),
)

GPT_OSS = Model(
    config={
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    },
    quantization={
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    variants={
        "vllm mxfp4 experts": Variant(True, {}),
        "vllm mxfp4 experts, fp8 cache": Variant(True, FP8_CACHE),
        "halfbyte mxfp4 experts, nvfp4 cache": Variant(True, halfbyte(moe="on")),
    },
    cases=((64, 4096), (128, 1024), (16, 1024), (1, 2048)),
)

MODELS = {"llama-3.1-8b": LLAMA, "qwen3-30b-a3b": QWEN3_MOE, "gpt-oss-20b": GPT_OSS}
"""Shapes by name."""
