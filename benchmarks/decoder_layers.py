"""Decoder layers of Llama-3.1-8B's shape in one CUDA graph, kernels as inside vLLM, on one GPU.

    python -m benchmarks.decoder_layers [--out benchmarks/results/decoder_layers.json]

A layer: norm, qkv, rotary embedding, store and decode in one call, o, norm, gate_up, SwiGLU, down.
So launches overlap as in a model, and at 64 x 8,192 the GPU is at its power limit. Eight layers
have weights, means and rings of their own; pages rotate over copies that together exceed the
caches. µs per layer, medians of replays in turns. A run takes 10 s, where `benchmarks.vllm_step`
takes minutes; to compare two trees, run both in turns on one GPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.chains import LINEAR
from benchmarks.layers import Times, measure, medians_in_turns
from benchmarks.recipe_speed import HEAD_SIZE, HEADS, KV_HEADS
from benchmarks.store_and_decode import RECIPES, attention_layers
from benchmarks.timing import capture
from halfbyte.bench.linear import LinearWeights
from halfbyte.elementwise import add_rms_norm, rotary_embedding, silu_and_mul
from halfbyte.linear import NvFp4Linear

RESULT = Path(__file__).parent / "results" / "decoder_layers.json"
CASES = ((64, 8192), (128, 2048), (16, 1024), (1, 4096))
_LAYERS = 8
_ROUNDS = 15
_HIDDEN = 4096
_MAX_POSITION = 8192
_EPSILON = 1e-5


def linear_layers(device: torch.device, backend: str = "cuda") -> list[list[NvFp4Linear]]:
    """qkv, o, gate_up and down of every layer."""
    weights = [LinearWeights(shape, device, torch.bfloat16) for shape in LINEAR]
    return [[weight.layer(backend) for weight in weights] for _ in range(_LAYERS)]


def layers_in_a_row(
    linear: list[list[NvFp4Linear]], batch: int, context: int, recipe: str, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A call of all layers for a step of `batch` sequences of `context` tokens.

    Returns:
        The hidden states `[batch, hidden]`, when it is called.
    """
    attention = attention_layers(batch, context, recipe, device)
    positions = torch.full((batch,), context - 1, device=device)
    norm = torch.ones(_HIDDEN, device=device, dtype=torch.bfloat16)
    angles = torch.rand(_MAX_POSITION, HEAD_SIZE, device=device).bfloat16()
    hidden = torch.randn(batch, _HIDDEN, device=device).bfloat16()
    sizes = [heads * HEAD_SIZE for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def call() -> torch.Tensor:
        x, residual = hidden, torch.zeros_like(hidden)
        for (qkv, o, gate_up, down), layer in zip(linear, attention, strict=True):
            y, residual = add_rms_norm(x, residual, norm, _EPSILON)
            q, k, v = qkv(y).split(sizes, dim=-1)
            q, k = rotary_embedding(positions, q, k, angles, HEAD_SIZE, False)
            q, k, v = (z.view(batch, -1, HEAD_SIZE) for z in (q, k, v))
            out = layer.with_tokens(k, v).store_and_attend(q)
            y, residual = add_rms_norm(o(out.view(batch, -1)), residual, norm, _EPSILON)
            x = down(silu_and_mul(gate_up(y)))
        return x

    return call


def measured(device: torch.device) -> Iterator[tuple[str, Times]]:
    """Times of each size, by recipe."""
    linear = linear_layers(device)
    for batch, context in CASES:
        graphs = {}
        for recipe in RECIPES:
            call = layers_in_a_row(linear, batch, context, recipe, device)
            call()  # compiles kernels
            graphs[recipe] = capture([call])
        yield f"{batch} x {context}", medians_in_turns(graphs, _ROUNDS, _LAYERS)


if __name__ == "__main__":
    measure(__doc__, RESULT, measured)
