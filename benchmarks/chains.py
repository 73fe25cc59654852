"""Calls behind each other in one CUDA graph, as in a model's layers: launches overlap.

    python -m benchmarks.chains [--out benchmarks/results/chains.json]

Times of single kernels do not show how launches that overlap share the SMs. Here a chain has, per
layer, a store and a decode; or the four linear layers of Llama-3.1-8B; or a layer's experts.
Weights and pages rotate over copies that together exceed the caches. µs per layer, medians of
replays in turns:

    limited    as the kernels are: an SM holds no more CTAs than the grid has per SM
               (`kernels.runtime.occupancy`)
    unlimited  as many CTAs as fit
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.layers import Times, measure, medians_in_turns
from benchmarks.timing import capture
from halfbyte.bench.attention_calls import attention_calls, store_calls
from halfbyte.bench.cases import decode as decode_case
from halfbyte.bench.cases import store
from halfbyte.bench.data import make_inputs
from halfbyte.bench.linear import LinearWeights
from halfbyte.bench.moe import MOE_SHAPES, RandomExperts
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.occupancy import bytes_for_ctas
from halfbyte.measure.timing import Call

RESULT = Path(__file__).parent / "results" / "chains.json"
DECODE = (
    *(("llama", 64, 8192), ("llama", 1, 131072), ("llama", 16, 1024)),
    *(("gpt-oss", 64, 8192), ("gpt-oss", 16, 1024), ("gpt-oss", 1, 2048)),
)
LINEAR = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""qkv, o, gate_up and down of Llama-3.1-8B."""
TOKENS = (1, 4, 8, 16, 64)
_LAYERS = 8
_ROUNDS = 9
Layers = Sequence[Call]
"""Calls of a chain, in order."""


def decode_chain(preset: str, batch: int, context: int, device: torch.device) -> Layers:
    """A step's store and decode, per layer."""
    case = decode_case(preset, batch, context)
    attend = attention_calls(case, make_inputs(case, "nvfp4", device))
    stores, _ = store_calls(store(preset, batch), "nvfp4", device)
    pairs = [(stores[i % len(stores)], attend[i % len(attend)]) for i in range(_LAYERS)]
    return [call for pair in pairs for call in pair]


def linear_chain(m: int, device: torch.device) -> Layers:
    """Linear layers of `m` tokens."""
    calls: list[Call] = []
    for _ in range(_LAYERS):
        for n, k in LINEAR:
            layer = LinearWeights((n, k), device, torch.bfloat16).layer("cuda")
            calls.append(partial(layer, torch.randn(m, k, device=device).bfloat16()))
    return calls


def experts_chain(model: str, m: int, device: torch.device) -> Layers:
    """Experts of `m` tokens."""
    experts = RandomExperts(MOE_SHAPES[model], device, torch.bfloat16)
    return experts.calls("cuda", experts.x(m))[:_LAYERS]


def chains(device: torch.device) -> Iterator[tuple[str, Callable[[], Layers]]]:
    """Chains by name."""
    for preset, batch, context in DECODE:
        make = partial(decode_chain, preset, batch, context, device)
        yield f"store and decode, {preset} {batch} x {context}", make
    for m in TOKENS:
        yield f"linear layers, {m} tokens", partial(linear_chain, m, device)
    for model in MOE_SHAPES:
        for m in (1, 4, 16):
            yield f"experts, {model}, {m} tokens", partial(experts_chain, model, m, device)


def captured(calls: Layers, limit: Callable[[int, int, int], int]) -> Call:
    """A graph of calls that are launched with such a limit."""
    nvrtc._shared_bytes_for.cache_clear()
    with patch.object(nvrtc, "bytes_for_ctas", limit):
        for call in calls:
            call()
        return capture(calls)


def microseconds(calls: Layers) -> Times:
    """Per layer, with and without the limit."""
    graphs = {
        "unlimited": captured(calls, lambda used, ctas, sm_bytes: used),
        "limited": captured(calls, bytes_for_ctas),
    }
    return medians_in_turns(graphs, _ROUNDS, _LAYERS)


def measured(device: torch.device) -> Iterator[tuple[str, Times]]:
    """Times of each chain."""
    for name, make in chains(device):
        yield name, microseconds(make())


if __name__ == "__main__":
    measure(__doc__, RESULT, measured)
