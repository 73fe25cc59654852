"""Decode attention on a CPU: halfbyte on packed NVFP4 pages, torch's SDPA on an unquantized cache.

    python -m benchmarks.attention_cpu [--out benchmarks/results/attention_cpu.json]

Cases, data and calls are those of `halfbyte bench attention`, 32 query heads, 8 KV heads, head size
128, pages of 16 in random order; SDPA gets contiguous K and V and the group folded into its query
dimension, which is far faster than `enable_gqa`. All instruction sets are measured, interleaved.
Queries are float32, but bfloat16 for `sdpa_bf16`, `halfbyte_avx512vnni` and `halfbyte_avx512bf16`,
which a bfloat16 model uses on CPUs with 16-bit dot products. Calls share the plan, which depends
only on lengths, as a model's layers do.

Medians and minima of 41 calls on several copies of the data, so that no call finds its data in a
CPU cache, as with the layers of a model. Uses all threads of torch.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from halfbyte.bench.attention_calls import (
    attention_calls,
    sdpa_calls,
    sdpa_dtypes,
)
from halfbyte.bench.cases import Case, decode
from halfbyte.bench.data import make_inputs
from halfbyte.kernels.cpu.library import LEVELS, set_level
from halfbyte.measure.report import short_name
from halfbyte.measure.timing import Call

RESULT = Path(__file__).parent / "results" / "attention_cpu.json"
CPU = torch.device("cpu")
CASES = tuple(decode("llama", *sizes) for sizes in ((1, 8192), (8, 2048), (1, 1024)))
REPEATS = 41
WITH_DOT_PRODUCTS = ("avx512vnni", "avx512bf16")

Turns = Iterator[Call]


def turns_of(case: Case, levels: list[str]) -> dict[str, Turns]:
    """Calls by name, each on the next copy of the data."""
    inputs = make_inputs(case, "nvfp4", CPU, torch.float32)
    turns: dict[str, Turns] = {}
    for level in levels:
        dtype = torch.bfloat16 if level in WITH_DOT_PRODUCTS else torch.float32
        of_dtype = replace(inputs, query=inputs.query.to(dtype))
        calls = attention_calls(case, of_dtype, backend="cpu")
        turns[f"halfbyte_{level}"] = itertools.cycle(calls)
    for dtype in sdpa_dtypes(case, CPU):
        name = f"sdpa_{short_name(str(dtype).removeprefix('torch.'))}"
        turns[name] = itertools.cycle(sdpa_calls(case, dtype, CPU))
    return turns


def milliseconds(turns: dict[str, Turns]) -> dict[str, list[float]]:
    """Times, with contenders interleaved so that noise affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(REPEATS + 3):
        for name, calls in turns.items():
            if name.startswith("halfbyte_"):
                set_level(name.removeprefix("halfbyte_"))
            call = next(calls)
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    set_level(None)
    return {name: values[3:] for name, values in times.items()}


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    levels = [level for level in LEVELS if set_level(level) == level and level != "portable"]
    set_level(None)
    report: dict[str, Any] = {
        **provenance(CPU),
        "milliseconds": [],
        "milliseconds_min": [],
    }
    for case in CASES:
        times = milliseconds(turns_of(case, levels))
        for key, summary in (("milliseconds", statistics.median), ("milliseconds_min", min)):
            row = {name: round(summary(values), 3) for name, values in times.items()}
            report[key].append({"batch": case.batch, "context": case.context, **row})
            print(key, json.dumps(report[key][-1]))
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
