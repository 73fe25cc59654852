"""Probed rotary embeddings, against the model's own K before and after RoPE."""

from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.attention_functions import GENERATE, register
from halfbyte.models.rotary import RotaryProbe
from models.zoo import ARCHITECTURES, make_model, token_ids

TOKENS = 70


class _Keys(AmaxRecorder):
    """K after RoPE, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *a: Any, **k: Any) -> Any:
        self.keys[layer_idx] = key_states[0].transpose(0, 1)
        return key_states, value_states


@torch.inference_mode()
def keys_of(model: Any) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """K before RoPE and after it, `[tokens, heads, D]`, by layer."""
    before: dict[int, torch.Tensor] = {}
    config = model.config
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    heads = config.num_key_value_heads

    def note(layer: int, fused: bool) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if fused:  # Q, K and V side by side
                start = config.num_attention_heads * head_size
                output = output[..., start : start + heads * head_size]
            # Norms of single heads get [1, heads, tokens, D] or [1, tokens, heads, D].
            if output.dim() == 4 and output.shape[1] == heads and output.shape[2] == TOKENS:
                output = output.transpose(1, 2)
            before[layer] = output[0].reshape(TOKENS, heads, head_size)

        return hook

    hooks = []
    for layer, block in enumerate(model.base_model.layers):
        attention = block.self_attn
        fused = hasattr(attention, "qkv_proj")
        module = attention.qkv_proj if fused else getattr(attention, "k_norm", attention.k_proj)
        hooks.append(module.register_forward_hook(note(layer, fused)))
    recorder = _Keys()
    register()
    model.set_attn_implementation(GENERATE)
    model(input_ids=token_ids(1, TOKENS), past_key_values=recorder, use_cache=True)
    for hook in hooks:
        hook.remove()
    return before, recorder.keys


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rotary_is_the_models_own(architecture: str) -> None:
    model = make_model(architecture)
    before, after = keys_of(model)
    kinds = list(getattr(model.config, "layer_types", None) or [None] * len(before))
    parameters = model.config.rope_parameters
    positions = torch.arange(TOKENS)
    for layer, kind in enumerate(kinds):
        probe = RotaryProbe(model, kind if isinstance(parameters.get(kind), dict) else None)
        cos, sin = (x[:, None] for x in probe.factors(positions))
        turned = cos * before[layer] + sin * before[layer][..., probe.partner]
        torch.testing.assert_close(turned, after[layer], rtol=1e-5, atol=1e-5)
        back = probe.unrotate(after[layer])
        torch.testing.assert_close(back, before[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("segment", [1, 64])
def test_averages_are_those_of_rotated_vectors(segment: int) -> None:
    model = make_model("llama")
    probe = RotaryProbe(model, None)
    averages = probe.averages(150, segment)
    segments = -(-150 // segment)
    assert averages.cos.shape == (segments, probe.partner.shape[0])
    x = torch.randn(probe.partner.shape[0])
    for s in (0, segments - 1):
        positions = torch.arange(s * segment, (s + 1) * segment)
        turned = probe.rotate(x.expand(segment, -1), positions).double().mean(0)
        mean = averages.cos[s] * x + averages.sin[s] * x[averages.partner]
        torch.testing.assert_close(mean.double(), turned, rtol=1e-5, atol=1e-6)


def test_model_without_a_rotary_embedding_is_refused() -> None:
    model = make_model("llama")
    del model.base_model.rotary_emb
    with pytest.raises(ValueError, match="LlamaForCausalLM: has no rotary embedding"):
        RotaryProbe(model, None)
