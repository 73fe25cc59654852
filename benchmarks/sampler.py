"""Time of sampling in a step: 64 sequences, Llama 3's vocabulary.

    python -m benchmarks.sampler [--device cuda] [--out benchmarks/results/sampler.json]

Milliseconds from logits on the device to tokens on the host, including the transfer; median of the
repeats.
"""

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch

from halfbyte.engine import Request, SamplingParams
from halfbyte.engine.sampler import Sampler
from halfbyte.measure.machine import versions

RESULT = Path(__file__).parent / "results" / "sampler.json"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "logprobs": {"logprobs": 5},
}


def measure(logits: torch.Tensor, params: SamplingParams, repeats: int) -> float:
    """Median milliseconds of a step's sampling."""
    prompt = list(range(1024))
    requests = [Request(i, prompt, params, seed=i) for i in range(len(logits))]
    sampler, times = Sampler(), []
    for _ in range(repeats + 2):
        if logits.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        sampler.sample(requests, logits)
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times[2:])[repeats // 2]


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    logits = torch.randn(arguments.rows, arguments.vocabulary, device=arguments.device).mul(3)
    results = {}
    for name, fields in CASES.items():
        value = measure(logits.bfloat16(), SamplingParams(**fields), arguments.repeats)
        results[name] = round(value, 3)
        print(f"{name:20} {value:8.3f} ms")
    report = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if logits.is_cuda else "CPU",
        "versions": versions(),
        "rows": arguments.rows,
        "vocabulary": arguments.vocabulary,
        "milliseconds": results,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
