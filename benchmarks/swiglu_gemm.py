"""SwiGLU inside the GEMM of gate and up, or behind it: an MLP of Llama-3.1-8B's shape on one GPU.

    python -m benchmarks.swiglu_gemm [--out benchmarks/results/swiglu_gemm.json]

Norm, gate and up, SwiGLU and down of three layers with weights of their own in one CUDA graph. µs
per layer, medians of replays in turns.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.chains import LINEAR
from benchmarks.layers import Times, measure, medians_in_turns
from benchmarks.timing import capture
from halfbyte.bench.linear import LinearWeights
from halfbyte.elementwise import add_rms_norm, silu_and_mul
from halfbyte.linear import NvFp4Linear
from halfbyte.linear.w4a16.swiglu import nvfp4_linear_swiglu_cuda

RESULT = Path(__file__).parent / "results" / "swiglu_gemm.json"
TOKENS = (64, 80, 96, 112, 128, 160, 256, 1024, 4096, 16384)
_LAYERS = 3
_ROUNDS = 11
_EPSILON = 1e-5
Swiglu = Callable[[NvFp4Linear, torch.Tensor], torch.Tensor]


def behind(gate_up: NvFp4Linear, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU as a kernel of its own."""
    return silu_and_mul(gate_up(x))


def inside(gate_up: NvFp4Linear, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU as part of the GEMM."""
    weight = (gate_up.weight, gate_up.weight_scale, gate_up.weight_row_scale)
    return nvfp4_linear_swiglu_cuda(x, *weight, None, gate_up.out_features // 2)


def layers_in_a_row(
    layers: list[tuple[NvFp4Linear, NvFp4Linear]], x: torch.Tensor, swiglu: Swiglu
) -> torch.Tensor:
    """The layers' result for x `[tokens, hidden]`; `layers` has gate and up, and down, of each."""
    norm = torch.ones_like(x[0])
    y = x
    for gate_up, down in layers:
        y, _ = add_rms_norm(y, x, norm, _EPSILON)
        y = down(swiglu(gate_up, y))
    return y


def measured(device: torch.device) -> Iterator[tuple[str, Times]]:
    """Times of each number of tokens."""
    weights = [LinearWeights(shape, device, torch.bfloat16) for shape in LINEAR[-2:]]
    layers = []
    for _ in range(_LAYERS):
        gate_up, down = (weight.layer("cuda") for weight in weights)
        layers.append((gate_up, down))
    for tokens in TOKENS:
        x = torch.randn(tokens, layers[0][0].in_features, device=device).bfloat16()
        graphs = {}
        for swiglu in (behind, inside):
            layers_in_a_row(layers, x, swiglu)  # compiles kernels
            graphs[swiglu.__name__] = capture([partial(layers_in_a_row, layers, x, swiglu)])
        yield f"{tokens} tokens", medians_in_turns(graphs, _ROUNDS, _LAYERS)


if __name__ == "__main__":
    measure(__doc__, RESULT, measured)
