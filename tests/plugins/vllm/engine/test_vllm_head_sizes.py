"""Models with K and V of different head sizes, which choose a backend of vLLM's themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.kvcache import KVScales
from halfbyte.plugins.vllm import chosen_backends
from halfbyte.plugins.vllm.backend import HalfbyteAttentionBackend
from halfbyte.plugins.vllm.registry import has_page_specs
from plugins.vllm.engine.engines import assert_ours, generate, needs_page_specs, varied, vllm_engine

Weights = dict[str, torch.Tensor]
LAYERS, HIDDEN, HEADS, KV_HEADS, K_SIZE, V_SIZE, VOCABULARY = 2, 128, 4, 2, 64, 32, 512
PROMPTS = [list(range(1 + 5 * n, 40 + 3 * n)) for n in range(1, 6)]


def random_weights() -> Weights:
    """Of a dense MiMo-V2 whose second layer has a sliding window."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return 0.15 * torch.randn(*shape, generator=generator)

    weights = {"model.norm.weight": torch.ones(HIDDEN)}
    for name in ("model.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = normal(VOCABULARY, HIDDEN)
    shapes = {
        "self_attn.q_proj": (HEADS * K_SIZE, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * K_SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * V_SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * V_SIZE),
        **{f"mlp.{name}_proj": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")},
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return weights


def padded(weights: Weights) -> Weights:
    """The same model with V as large as K: the other values of V are zeros."""
    weights = dict(weights)
    missing = K_SIZE - V_SIZE
    for layer in range(LAYERS):
        of_v, of_o = (f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "vo")
        value = weights[of_v].view(KV_HEADS, V_SIZE, HIDDEN)
        value = torch.nn.functional.pad(value, (0, 0, 0, missing))
        output = weights[of_o].view(HIDDEN, HEADS, V_SIZE)
        output = torch.nn.functional.pad(output, (0, missing))
        weights[of_v] = value.reshape(KV_HEADS * K_SIZE, HIDDEN).contiguous()
        weights[of_o] = output.reshape(HIDDEN, HEADS * K_SIZE).contiguous()
    return weights


def save(folder: Path, weights: Weights, v_size: int) -> Path:
    sizes = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": K_SIZE,
        "v_head_dim": v_size,
    }
    config: dict[str, Any] = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        **sizes,
        **{f"swa_{name}": value for name, value in sizes.items()},
        "sliding_window_size": 16,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 0],
        "n_routed_experts": 1,
        "attention_bias": False,
        "layernorm_epsilon": 1e-6,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    KVScales((4.0,) * LAYERS, (2.0,) * LAYERS, "test").save(folder)
    return folder


OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}


@needs_page_specs
def test_v_is_smaller_than_k(tmp_path: Path) -> None:
    """Tokens equal those of the same model with V padded by zeros, in every format."""
    weights = random_weights()
    folders = {
        V_SIZE: save(tmp_path / "smaller", weights, V_SIZE),
        K_SIZE: save(tmp_path / "padded", padded(weights), K_SIZE),
    }
    results = {}
    for dtype in ("auto", "fp8", "nvfp4"):
        for v_size, folder in folders.items():
            with vllm_engine(folder, kv_cache_dtype=dtype, **OPTIONS) as llm:
                impls = assert_ours(llm)
                assert {impl.sliding_window for impl in impls} == {None, 16}
                results[dtype, v_size] = generate(llm, PROMPTS, 24)
        assert results[dtype, V_SIZE] == results[dtype, K_SIZE], dtype
        assert varied(results[dtype, V_SIZE])
    assert results["nvfp4", V_SIZE] != results["auto", V_SIZE]


def test_other_backends_of_models_are_refused() -> None:
    """A subclass may do more, such as vLLM's for sinks that are keys."""
    from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

    class StaticSinks(TritonAttentionDiffKVBackend):
        pass

    with pytest.raises(
        ValueError, match=r"TRITON_ATTN_DIFFKV, which the model chooses for layers\.0,"
    ):
        chosen_backends._in_place_of(StaticSinks, "layers.0")
    assert chosen_backends._in_place_of(HalfbyteAttentionBackend, "") is HalfbyteAttentionBackend


@pytest.mark.skipif(has_page_specs(), reason="this vLLM can express it")
def test_v_smaller_than_k_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "smaller", random_weights(), V_SIZE)
    with (
        pytest.raises(ValueError, match=r"_DIFFKV, which the model chooses for .*leave out"),
        vllm_engine(folder, **OPTIONS),
    ):
        pass
