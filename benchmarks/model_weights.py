"""A whole model on one GPU, bf16 weights against NVFP4: prompts and decode steps.

    python benchmarks/model_weights.py [--out benchmarks/results/model_weights.json]

Llama-3.1-8B's shape with random weights, transformers' model code. `prefill_tokens_per_s` is a
pass over prompts without a cache, as Python runs it, and `captured_tokens_per_s` the same in a CUDA
graph, where the host's time is not in the way; `step_ms` the engine's captured decode step on an
NVFP4 cache (`decode_step.py`). Then every linear layer but the output's becomes an `NvFp4Linear`
(W4A16), and all are measured again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from decode_step import llama_8b, measure, run_of
from torch import nn

from halfbyte.bench.timing import Call, capture
from halfbyte.linear import NvFp4Linear

RESULT = Path(__file__).parent / "results" / "model_weights.json"


def prefill(model: Any, batch: int, length: int) -> tuple[float, float]:
    """Tokens per second, run by Python and in a graph."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")

    def run() -> None:
        model(tokens, use_cache=False, logits_to_keep=1)

    with torch.inference_mode():
        times = median_milliseconds(run), median_milliseconds(capture([run]))
    by_python, captured = (round(tokens.numel() / time * 1e3, 1) for time in times)
    return by_python, captured


def median_milliseconds(call: Call, repeats: int = 7) -> float:
    """Of a call whose kernels find the GPU idle, until the last one has ended."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[repeats // 2]


def quantize(model: nn.Module) -> None:
    """Put an `NvFp4Linear` in place of every `nn.Linear` but `lm_head`."""
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
    model = llama_8b(arguments.layers)
    report: dict[str, Any] = {**run_of(arguments), "weights": {}}
    for weights in ("bfloat16", "nvfp4"):
        if weights == "nvfp4":
            quantize(model)
        # One prompt, and as many as make 8,192 tokens.
        passes = {(1, n) for n in arguments.prompts} | {(8192 // n, n) for n in arguments.prompts}
        rates = {f"{count}x{n}": prefill(model, count, n) for count, n in sorted(passes)}
        row = {
            "prefill_tokens_per_s": {name: rate for name, (rate, _) in rates.items()},
            "captured_tokens_per_s": {name: rate for name, (_, rate) in rates.items()},
            "step_ms": measure(model, "nvfp4", arguments.batch, arguments.context)["step_ms"],
        }
        print(weights, json.dumps(row), flush=True)
        report["weights"][weights] = row
        torch.cuda.empty_cache()
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
