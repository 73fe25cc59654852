"""Decode attention on a CPU: halfbyte on packed NVFP4 pages, torch's SDPA on an unquantized cache.

    python benchmarks/attention_cpu.py [--out benchmarks/results/attention_cpu.json]

32 query heads, 8 KV heads, head size 128, pages of 16 in random order; SDPA gets contiguous K and V
and the group folded into its query dimension, which is far faster than `enable_gqa`. Medians of 21
calls, taken in turn, on all threads of torch.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.attention import paged_attention
from halfbyte.kernels.decode_cpu import LEVELS, set_level
from halfbyte.layouts import PageLayout

RESULT = Path(__file__).parent / "results" / "attention_cpu.json"
KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 8, 4, 128, 16
SHAPES = ((1, 8192), (8, 2048), (1, 1024))
REPEATS = 21


def halfbyte_call(batch: int, context: int) -> Callable[[], torch.Tensor]:
    """A call on random codes and scales."""
    layout = PageLayout("nvfp4", "nvfp4", HEAD_SIZE, None, KV_HEADS, BLOCK_SIZE)
    num_pages = batch * context // BLOCK_SIZE
    pages = torch.randint(0, 256, (num_pages, layout.page_bytes), dtype=torch.uint8)
    views = layout.views(pages)
    for block_scales in (views.k_scale, views.v_scale):
        assert block_scales is not None
        block_scales.random_(0x28, 0x48)  # 0.25 .. 4
    query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE)
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
    return lambda: paged_attention(query, pages, **arguments)


def sdpa_call(batch: int, context: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A call on contiguous K and V, the group folded into the query dimension."""
    key, value = (torch.randn(batch, KV_HEADS, context, HEAD_SIZE).to(dtype) for _ in range(2))
    query = torch.randn(batch, KV_HEADS, GROUP, HEAD_SIZE).to(dtype)
    return lambda: F.scaled_dot_product_attention(query, key, value)


def milliseconds(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    """Medians; the calls take turns, so that a noisy machine is noisy for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 3):
        for name, call in calls.items():
            if name.startswith("halfbyte_"):
                set_level(name.removeprefix("halfbyte_"))
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    set_level("avx512")
    return {name: round(statistics.median(values[3:]), 3) for name, values in times.items()}


def _processor() -> str:
    """The processor's name, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores seen" if names else platform.processor()


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    levels = [level for level in LEVELS if set_level(level) == level and level != "portable"]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instruction_sets": levels,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
        "milliseconds": [],
    }
    for batch, context in SHAPES:
        calls = {f"halfbyte_{level}": halfbyte_call(batch, context) for level in levels}
        calls["sdpa_bfloat16"] = sdpa_call(batch, context, torch.bfloat16)
        calls["sdpa_float32"] = sdpa_call(batch, context, torch.float32)
        row = {"batch": batch, "context": context, **milliseconds(calls)}
        report["milliseconds"].append(row)
        print(json.dumps(row))
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
