"""Time of a MoE layer's router on one GPU: gate, softmax, top-k.

    python -m benchmarks.router [--out FILE]

`kernel` is `halfbyte.moe.route`; `vllm` a product by cuBLAS and vLLM's kernel for softmax and
top-k, where vLLM is installed. Shapes of Qwen3-30B-A3B and GPT-OSS-20B. Times are those of
`benchmarks.timing`; gates are in L2, as in a model they are small.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.provenance import provenance
from benchmarks.timing import measure_in_turns, ready
from halfbyte.dispatch import is_installed
from halfbyte.measure.timing import Call
from halfbyte.moe import route

RESULTS = Path(__file__).parent / "results"
SHAPES = {"qwen3-30b-a3b": (128, 2048, 8), "gpt-oss-20b": (32, 2880, 4)}
"""Experts, hidden size, experts per token."""
TOKENS = (1, 16, 64, 128, 256)
ROUNDS = 8


def vllm_router(x: torch.Tensor, gate: torch.Tensor, top_k: int) -> None:
    """What vLLM's models run."""
    from vllm._custom_ops import topk_softmax

    m = len(x)
    weights = torch.empty(m, top_k, device=x.device)
    ids, order = torch.empty(2, m, top_k, dtype=torch.int32, device=x.device)
    topk_softmax(weights, ids, order, linear(x, gate), True)


def contenders(shape: tuple[int, int, int], m: int, device: torch.device) -> dict[str, Call]:
    """Calls with the same arguments."""
    experts, hidden, top_k = shape
    x = torch.randn(m, hidden, device=device).bfloat16()
    gate = torch.randn(experts, hidden, device=device).bfloat16()
    calls: dict[str, Call] = {"kernel": partial(route, x, gate, top_k)}
    if is_installed("vllm"):
        calls["vllm"] = partial(vllm_router, x, gate, top_k)
    return calls


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "router.json")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    report: dict[str, Any] = {**provenance(device), "microseconds": {}}
    for name, shape in SHAPES.items():
        for m in TOKENS:
            calls = contenders(shape, m, device)
            prepared = {key: ready([call], device, in_graph=True) for key, call in calls.items()}
            times = measure_in_turns(prepared, device, ROUNDS)
            report["microseconds"][f"{name} {m}"] = times
            print(name, m, {key: t["in_graph"] for key, t in times.items()}, flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
