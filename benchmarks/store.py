"""Storing K and V on one GPU, relative to the bandwidth of a plain copy.

    python -m benchmarks.store [--out benchmarks/results/store.json]

K and V are bfloat16, 8 heads of 128. `single`, `back_to_back` and `in_graph` are those of
`benchmarks.timing`, the last per store in a graph of many, like the one per layer of an engine's
decode step; `host` is the CPU time of an uncaptured call. Stores rotate over copies of inputs and
pages. The copies of a prompt exceed L2; a decode step's inputs were just computed, so its copies
are those of 32 layers. Slots are random.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.timing import measure
from halfbyte.kvcache import reshape_and_cache
from halfbyte.layouts import PageLayout
from halfbyte.measure.timing import bandwidths

RESULT = Path(__file__).parent / "results" / "store.json"
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4", "nvfp4_4over6")
TOKENS = (8192, 64)
HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 16
_ROTATED_BYTES = 400e6
_LAYERS = 32
_HOST_CALLS = 200

Call = Callable[[], None]


def stores(kv_cache_dtype: str, tokens: int) -> tuple[list[Call], int]:
    """Stores of `tokens` tokens on different data, each checked, and bytes moved per store."""
    layout = PageLayout(kv_cache_dtype, kv_cache_dtype, HEAD_SIZE, None, HEADS, BLOCK_SIZE)
    input_bytes = 2 * tokens * HEADS * HEAD_SIZE * 2
    num_bytes = int(input_bytes + tokens * layout.bytes_per_token)
    copies = max(4, min(_LAYERS, 1 + int(_ROTATED_BYTES // num_bytes)))
    num_pages = 2 * tokens // BLOCK_SIZE
    scale = torch.tensor(0.002, device="cuda")
    calls: list[Call] = []
    for _ in range(copies):
        key, value = torch.randn(2, tokens, HEADS, HEAD_SIZE, device="cuda").bfloat16()
        slots = torch.randperm(num_pages * BLOCK_SIZE, device="cuda")[:tokens]
        pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device="cuda")
        arguments = (key, value, pages, slots, layout, scale, scale)
        expected = pages.clone()
        reshape_and_cache(key, value, expected, *arguments[3:], backend="reference")
        reshape_and_cache(*arguments)
        if not torch.equal(pages, expected):
            raise RuntimeError(f"{kv_cache_dtype}: the kernel's bytes are not the reference's")
        calls.append(partial(reshape_and_cache, *arguments))
    return calls, num_bytes


def host_microseconds(call: Call) -> float:
    """CPU time of one call, while the GPU's queue is not full."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed * 1e6 / _HOST_CALLS


def measure_stores(kv_cache_dtype: str, tokens: int, copy_bandwidth: float) -> dict[str, Any]:
    """A row of the report: times in µs, and `of_copy`, the share of the copy bandwidth (TB/s)."""
    device = torch.device("cuda")
    calls, num_bytes = stores(kv_cache_dtype, tokens)
    times = measure(calls, device, in_graph=True)
    return {
        "tokens": tokens,
        "heads": HEADS,
        "head_size": HEAD_SIZE,
        "kv_cache_dtype": kv_cache_dtype,
        "megabytes": round(num_bytes / 1e6, 2),
        **times,
        "host": round(host_microseconds(calls[0]), 1),
        "of_copy": round(num_bytes / times["in_graph"] / 1e6 / copy_bandwidth, 3),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The report in Markdown."""
    lines = [
        "| tokens | format | MB | single | back to back | in a graph | of a copy | host |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = (
            row["tokens"],
            row["kv_cache_dtype"],
            row["megabytes"],
            f"{row['single']} µs",
            f"{row['back_to_back']} µs",
            f"{row['in_graph']} µs",
            f"{row['of_copy']:.0%}",
            f"{row['host']} µs",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    _, copy_bandwidth = bandwidths(torch.device("cuda"))
    rows = [
        measure_stores(kv_cache_dtype, tokens, copy_bandwidth)
        for tokens in TOKENS
        for kv_cache_dtype in FORMATS
    ]
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_terabytes_per_s": copy_bandwidth,
        "microseconds": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
