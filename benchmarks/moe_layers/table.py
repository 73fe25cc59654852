"""Reports of the benchmark of experts: on the terminal and in Markdown."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.linear_layers.ratios import READ, ours, time_of
from benchmarks.peers.moe import MOE_PEERS
from halfbyte.bench import MOE_SHAPES

Row = dict[str, Any]
Report = dict[str, Any]
_NAMES = {str(shape): name for name, shape in MOE_SHAPES.items()}
_TITLES = {
    "vllm_marlin": "vLLM Marlin",
    "vllm_bf16": "vLLM bf16",
    "humming": "Humming",
    "triton_kernels": "triton_kernels",
}


def moe_tables(report: Report) -> Iterator[Table]:
    """A table per shape, in µs of the first timing of `judged_by`; then the peers skipped."""
    rows, timing = report["microseconds"], report["judged_by"][0]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        chosen = [row for row in rows if row["shape"] == shape]
        names = list(dict.fromkeys(name for row in chosen for name in row["contenders"]))
        table = Table(box=None, pad_edge=False)
        for heading in (shape, "MB hit", *names, "of read rate", "/ read", "/ peer", "/ bf16"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in chosen:
            found = row[timing]
            ratios = ("ours_over_read", "ours_over_fastest_peer", "ours_over_bf16")
            table.add_row(
                f"M {row['m']}",
                f"{row['bytes_hit'] / 1e6:,.1f}",
                *(_cell(row["contenders"].get(name, {}), timing) for name in names),
                _share(found["ours_of_read_rate"]),
                *(_ratio(found[name]) for name in ratios),
            )
        yield table
        skipped = Table(box=None, pad_edge=False, show_header=False)
        for name, reason in report["skipped"][shape].items():
            skipped.add_row(f"{name}: {reason}")
        yield skipped


def moe_markdown_table(report: Report) -> str:
    """halfbyte, peers that ran, and a plain read, by the timing that bounds use."""
    rows, timing = report["microseconds"], report["judged_by"][0]
    peers = [name for name in MOE_PEERS.names() if any(time_of(r, name, timing) for r in rows)]
    heads = ["experts", "tokens (M)", "MB hit", "halfbyte", *(_TITLES[name] for name in peers)]
    heads += ["plain read", "of the read rate", "halfbyte / fastest peer"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        found = row[timing]
        cells = [
            _NAMES.get(row["shape"], row["shape"]),
            f"{row['m']:,}",
            f"{row['bytes_hit'] / 1e6:,.0f}",
            *(_rounded(time_of(row, name, timing)) for name in (ours(row), *peers, READ)),
            _share(found["ours_of_read_rate"]),
            _ratio(found["ours_over_fastest_peer"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(entry: Row, timing: str) -> str:
    if "failed" in entry:
        return "failed"
    return f"{entry[timing]:,.1f}" if timing in entry else ""


def _rounded(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds:,.1f} µs" if microseconds < 100 else f"{microseconds:,.0f} µs"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
