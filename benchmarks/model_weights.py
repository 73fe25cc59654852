"""A whole model on one GPU with bf16 and with NVFP4 weights: prefill and decode steps.

    python -m benchmarks.model_weights [--out benchmarks/results/model_weights.json]

Llama-3.1-8B's shape with random weights, transformers' model code, and the same with every linear
layer but `lm_head` as an `NvFp4Linear` (W4A16). `prefill_tokens_per_s` is an eager pass over
prompts without a cache, and `captured_tokens_per_s` the same in a CUDA graph, without host time;
passes of equal length are interleaved. `step_ms` is the engine's captured decode step on an NVFP4
cache (`decode_step.py`).
"""

import argparse
import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.decode_step import measure, random_model, run_of
from benchmarks.timing import Ready, capture, measure_in_turns
from halfbyte.linear import NvFp4Linear

RESULT = Path(__file__).parent / "results" / "model_weights.json"
_ROUNDS = 5


def prefill(models: dict[str, Any], batch: int, length: int) -> dict[str, tuple[float, float]]:
    """Tokens per second by model, eager and in a CUDA graph."""
    vocabulary = next(iter(models.values())).config.vocab_size
    tokens = torch.randint(0, vocabulary, (batch, length), device="cuda")

    def run(model: Any) -> None:
        model(tokens, use_cache=False, logits_to_keep=1)

    ways = {}
    for name, model in models.items():
        by_python = partial(run, model)
        ways[name] = Ready([by_python], captured=False)
        ways[f"{name} captured"] = Ready([capture([by_python])], captured=True)
    times = measure_in_turns(ways, torch.device("cuda"), _ROUNDS)
    rates = {way: round(tokens.numel() / each["single"] * 1e6, 1) for way, each in times.items()}
    return {name: (rates[name], rates[f"{name} captured"]) for name in models}


def quantize(model: nn.Module) -> None:
    """Replace every `nn.Linear` but `lm_head` by an `NvFp4Linear`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, child = name.rpartition(".")
            layer = NvFp4Linear.from_float(module)
            layer.process_weights_after_loading()
            setattr(model.get_submodule(parent), child, layer)


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    arguments = parser.parse_args()
    models = {"bfloat16": random_model(arguments.layers)}
    models["nvfp4"] = deepcopy(models["bfloat16"])
    quantize(models["nvfp4"])
    # One prompt, and batches of 8,192 tokens.
    passes = {(1, n) for n in arguments.prompts} | {(8192 // n, n) for n in arguments.prompts}
    with torch.inference_mode():
        rates = {f"{count}x{n}": prefill(models, count, n) for count, n in sorted(passes)}
    report: dict[str, Any] = {**run_of(arguments), "weights": {}}
    for weights, model in models.items():
        row = {
            "prefill_tokens_per_s": {name: rate[weights][0] for name, rate in rates.items()},
            "captured_tokens_per_s": {name: rate[weights][1] for name, rate in rates.items()},
            "step_ms": measure(model, "nvfp4", arguments.batch, arguments.context)["step_ms"],
        }
        print(weights, json.dumps(row), flush=True)
        report["weights"][weights] = row
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
