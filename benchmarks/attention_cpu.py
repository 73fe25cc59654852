"""Decode attention on a CPU: halfbyte on packed NVFP4 pages, torch's SDPA on an unquantized cache.

    python benchmarks/attention_cpu.py [--out benchmarks/results/attention_cpu.json]

32 query heads, 8 KV heads, head size 128, pages of 16 in random order; SDPA gets contiguous K and V
and the group folded into its query dimension, which is far faster than `enable_gqa`. Queries are
float32, but bfloat16 for `sdpa_bfloat16` and for `halfbyte_avx512vnni` and `halfbyte_avx512bf16`,
which is what a model in bfloat16 runs on where the CPU has dot products of 16 bits.

Medians and minima of 41 calls, taken in turn on several copies of the data, which together are
twice the largest cache: as with the layers of a model, nobody finds its data there. On all threads
of torch.
"""

import argparse
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.attention import paged_attention
from halfbyte.bench.machine import machine, versions
from halfbyte.bench.processor import largest_cache_bytes
from halfbyte.kernels.cpu_library import LEVELS, set_level
from halfbyte.layouts import PageLayout

RESULT = Path(__file__).parent / "results" / "attention_cpu.json"
KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 8, 4, 128, 16
SHAPES = ((1, 8192), (8, 2048), (1, 1024))
REPEATS = 41
WITH_DOT_PRODUCTS = ("avx512vnni", "avx512bf16")


def halfbyte_call(
    batch: int, context: int, dtype: torch.dtype = torch.float32, copies: int = 1
) -> Callable[[], torch.Tensor]:
    """A call on random codes and scales, with queries of a dtype; the next copy each time."""
    layout = PageLayout("nvfp4", "nvfp4", HEAD_SIZE, None, KV_HEADS, BLOCK_SIZE)
    num_pages = batch * context // BLOCK_SIZE
    pools = []
    for _ in range(copies):
        pages = torch.randint(0, 256, (num_pages, layout.page_bytes), dtype=torch.uint8)
        views = layout.views(pages)
        for block_scales in (views.k_scale, views.v_scale):
            assert block_scales is not None
            block_scales.random_(0x28, 0x48)  # 0.25 .. 4
        pools.append(pages)
    query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE).to(dtype)
    arguments: dict[str, Any] = {
        "layout": layout,
        "query_start_loc": torch.arange(batch + 1, dtype=torch.int32),
        "seq_lens": torch.full((batch,), context, dtype=torch.int32),
        "block_tables": torch.randperm(num_pages).int().view(batch, -1),
        "scale": HEAD_SIZE**-0.5,
        "k_scale": 0.02,
        "v_scale": 0.02,
        "backend": "cpu",
    }
    turns = itertools.cycle(pools)
    return lambda: paged_attention(query, next(turns), **arguments)


def sdpa_call(
    batch: int, context: int, dtype: torch.dtype, copies: int = 1
) -> Callable[[], torch.Tensor]:
    """A call on contiguous K and V, the group folded into the query dimension."""
    shape = (2, batch, KV_HEADS, context, HEAD_SIZE)
    turns = itertools.cycle([torch.randn(shape).to(dtype) for _ in range(copies)])
    query = torch.randn(batch, KV_HEADS, GROUP, HEAD_SIZE).to(dtype)
    return lambda: F.scaled_dot_product_attention(query, *next(turns))


def copies_of(batch: int, context: int, levels: int) -> int:
    """Of everybody's data, so that all copies are twice the largest cache of this machine."""
    elements = 2 * batch * context * KV_HEADS * HEAD_SIZE
    bytes_of_all = elements * (levels * 9 / 16 + 2 + 4)
    return math.ceil(2 * (largest_cache_bytes() or 1 << 26) / bytes_of_all)


def milliseconds(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, list[float]]:
    """Times; the calls take turns, so that a noisy machine is noisy for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 3):
        for name, call in calls.items():
            if name.startswith("halfbyte_"):
                set_level(name.removeprefix("halfbyte_"))
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
        "date": datetime.date.today().isoformat(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "levels": levels,
        "milliseconds": [],
        "milliseconds_min": [],
    }
    for batch, context in SHAPES:
        copies = copies_of(batch, context, len(levels))
        calls = {
            f"halfbyte_{level}": halfbyte_call(
                batch,
                context,
                torch.bfloat16 if level in WITH_DOT_PRODUCTS else torch.float32,
                copies,
            )
            for level in levels
        }
        calls["sdpa_bfloat16"] = sdpa_call(batch, context, torch.bfloat16, copies)
        calls["sdpa_float32"] = sdpa_call(batch, context, torch.float32, copies)
        times = milliseconds(calls)
        for key, summary in (("milliseconds", statistics.median), ("milliseconds_min", min)):
            row = {name: round(summary(values), 3) for name, values in times.items()}
            report[key].append({"batch": batch, "context": context, "copies": copies, **row})
            print(key, json.dumps(report[key][-1]))
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
