"""Decode attention on one GPU: halfbyte on an NVFP4 cache, FlashInfer on bf16 and fp8 caches.

    python benchmarks/attention_decode.py [--out benchmarks/results/attention_decode.json]
    python benchmarks/attention_decode.py --table    # of the committed run, into README.md

Every call is captured in a CUDA graph: plan, chunks and merge for halfbyte; chunks and merge for
FlashInfer, whose plan is made beforehand. `single` is the median of 40 replays timed one by one,
`back_to_back` the mean of 20 in a row. Data rotates among enough copies to leave the L2. Codes and
scales are random, pages in random order. FlashInfer is measured where it is installed (0.7.0 on).
"""

import argparse
import datetime
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfbyte.attention import paged_attention
from halfbyte.kvcache import read_tokens
from halfbyte.layouts import PageLayout

RESULT = Path(__file__).parent / "results" / "attention_decode.json"
README = Path(__file__).parents[1] / "README.md"
MARKERS = re.compile(r"(<!-- decode -->\n).*?(<!-- /decode -->)", re.DOTALL)
_ROTATED_BYTES = 400e6


@dataclass(frozen=True)
class Shape:
    """A batch of equal lengths, or of log-uniform ones up to `context`."""

    batch: int
    context: int
    kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    block_size: int = 16
    sinks: bool = False
    ragged: bool = False

    def lengths(self) -> torch.Tensor:
        """int32 `[batch]`, the same for every run."""
        if not self.ragged:
            return torch.full((self.batch,), self.context, dtype=torch.int32)
        generator = torch.Generator().manual_seed(0)
        low = torch.log(torch.tensor(64.0))
        span = torch.log(torch.tensor(float(self.context))) - low
        return torch.exp(low + span * torch.rand(self.batch, generator=generator)).int()


SHAPES = (
    Shape(64, 8192),
    Shape(8, 32768),
    Shape(1, 131072),
    Shape(128, 1024),
    Shape(64, 8192, group=8, head_size=64, block_size=64, sinks=True),
    Shape(64, 16384, ragged=True),
    Shape(16, 32768, ragged=True),
    Shape(256, 2048, ragged=True),
)


def microseconds(calls: list[Callable[[], Any]]) -> dict[str, float]:
    """Times of calls on rotating data, each captured in a graph."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()

    def elapsed(replays: list[torch.cuda.CUDAGraph]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for graph in replays:
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    singles = sorted(elapsed([graphs[i % len(graphs)]]) for i in range(40))
    many = elapsed([graphs[i % len(graphs)] for i in range(20)]) / 20
    return {"single": round(singles[20], 1), "back_to_back": round(many, 1)}


def page_tables(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lengths and a random block table on the GPU, and the pages that it needs."""
    lengths = shape.lengths()
    counts = -(-lengths // shape.block_size)
    order = torch.randperm(int(counts.sum())).int()
    table = torch.zeros((shape.batch, int(counts.max())), dtype=torch.int32)
    for row, (start, count) in enumerate(
        zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True)
    ):
        table[row, :count] = order[start : start + count]
    return lengths.cuda(), table.cuda(), int(counts.sum())


def halfbyte_nvfp4(shape: Shape) -> dict[str, float]:
    """Times, bytes read per second and error of halfbyte on an NVFP4 cache."""
    layout = PageLayout("nvfp4", "nvfp4", shape.head_size, None, shape.kv_heads, shape.block_size)
    lengths, table, num_pages = page_tables(shape)
    copies = min(8, 1 + int(_ROTATED_BYTES // (num_pages * layout.page_bytes)))
    heads = shape.kv_heads * shape.group
    query = torch.randn(shape.batch, heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
    sinks = torch.randn(heads, device="cuda") if shape.sinks else None
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    scale = torch.tensor(0.02, device="cuda")
    pools = []
    for _ in range(copies):
        pages = torch.empty(
            (num_pages, layout.page_bytes), dtype=torch.uint8, device="cuda"
        ).random_(0, 256)
        views = layout.views(pages)
        for block_scales in (views.k_scale, views.v_scale):
            assert block_scales is not None
            block_scales.random_(0x28, 0x48)  # 0.25 .. 4
        pools.append(pages)
    arguments: dict[str, Any] = {
        "layout": layout,
        "query_start_loc": starts,
        "seq_lens": lengths,
        "block_tables": table,
        "scale": shape.head_size**-0.5,
        "k_scale": scale,
        "v_scale": scale,
        "sinks": sinks,
        "backend": "cuda",
    }
    times = microseconds(
        [lambda pages=pages: paged_attention(query, pages, **arguments) for pages in pools]  # type: ignore[misc]
    )
    num_bytes = int(lengths.sum()) * layout.bytes_per_token
    times["terabytes_per_s"] = round(num_bytes / times["back_to_back"] / 1e6, 3)
    times["error"] = _error(shape, query, pools[0], arguments)
    return times


def _error(
    shape: Shape, query: torch.Tensor, pages: torch.Tensor, arguments: dict[str, Any]
) -> float:
    """Largest error of the first sequence over the largest value, against float64 of its cache."""
    out = paged_attention(query, pages, **arguments)[0].double()
    length = int(arguments["seq_lens"][0])
    positions = torch.arange(length, device="cuda")
    table = arguments["block_tables"][0].long()
    slots = table[positions // shape.block_size] * shape.block_size + positions % shape.block_size
    layout, scale = arguments["layout"], arguments["k_scale"]
    key, value = read_tokens(pages, slots, layout, scale, scale, torch.float64)
    logits = torch.einsum("hgd,nhd->hgn", query[0].double().unflatten(0, (shape.kv_heads, -1)), key)
    logits = logits * arguments["scale"]
    if arguments["sinks"] is not None:
        sinks = arguments["sinks"].double().view(shape.kv_heads, -1, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., :length]
    exact = torch.einsum("hgn,nhd->hgd", weights, value).flatten(0, 1)
    return float((out - exact).abs().max() / exact.abs().max())


def flashinfer(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Times of FlashInfer's paged decode on a cache of another format (no sinks)."""
    import flashinfer as fi

    lengths, table, num_pages = page_tables(shape)
    counts = -(-lengths // shape.block_size)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    indices = torch.cat([row[:n] for row, n in zip(table, counts.tolist(), strict=True)])
    last = (lengths - (counts - 1) * shape.block_size).int()
    heads = shape.kv_heads * shape.group
    query = torch.randn(shape.batch, heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
    cache_shape = (num_pages, 2, shape.kv_heads, shape.block_size, shape.head_size)
    num_bytes = num_pages * 2 * shape.kv_heads * shape.block_size * shape.head_size * dtype.itemsize
    copies = min(4, 1 + int(_ROTATED_BYTES // num_bytes))
    caches = [
        torch.randn(cache_shape, dtype=torch.bfloat16, device="cuda").to(dtype)
        for _ in range(copies)
    ]
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda"),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    wrapper.plan(
        indptr,
        indices,
        last,
        heads,
        shape.kv_heads,
        shape.head_size,
        shape.block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=dtype,
    )
    out = torch.empty_like(query)
    return microseconds([lambda c=c: wrapper.run(query, c, out=out) for c in caches])  # type: ignore[misc]


def read_bandwidth() -> float:
    """TB/s of a plain reduction over 4 GiB."""
    data = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    times = microseconds([lambda: data.sum()])
    return round(data.numel() * 4 / times["single"] / 1e6, 3)


def table(report: dict[str, Any]) -> str:
    """The single-replay times in Markdown."""
    lines = [
        "| sequences x context | KV heads x group x head size | halfbyte nvfp4 | FlashInfer fp8 "
        "| FlashInfer bf16 | halfbyte / bf16 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in report["microseconds"]:
        times = [
            row.get(name, {}).get("single")
            for name in ("halfbyte_nvfp4", "flashinfer_fp8", "flashinfer_bf16")
        ]
        cells = [f"{time:.0f} µs" if time else "" for time in times]
        context = f"up to {row['context']:,}" if row["ragged"] else f"{row['context']:,}"
        shape = f"{row['kv_heads']} x {row['group']} x {row['head_size']}"
        shape += " with sinks" if row["sinks"] else ""
        ratio = f"{times[0] / times[2]:.2f}" if times[2] else ""
        lines.append(f"| {row['batch']} x {context} | {shape} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="write the README's table only")
    arguments = parser.parse_args()
    if arguments.table:
        text = README.read_text()
        README.write_text(
            MARKERS.sub(rf"\g<1>{table(json.loads(arguments.out.read_text()))}\g<2>", text)
        )
        return
    peers = {"flashinfer_bf16": torch.bfloat16, "flashinfer_fp8": torch.float8_e4m3fn}
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        version, peers = "", {}
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "flashinfer": version or None},
        "read_terabytes_per_s": read_bandwidth(),
        "microseconds": [],
    }
    for shape in SHAPES:
        row: dict[str, Any] = {**asdict(shape), "halfbyte_nvfp4": halfbyte_nvfp4(shape)}
        for name, dtype in peers.items():
            if dtype != torch.bfloat16 and shape.head_size != 128:
                continue  # one more kernel to compile than the comparison needs
            row[name] = flashinfer(shape, dtype)
        report["microseconds"].append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
