"""Reports as tables: on the terminal, and in Markdown for the README."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from halfbyte.bench.cases import WITHOUT_PEERS, Case

_FIELDS = frozenset(Case.__dataclass_fields__)
_LAST_HEADINGS = {
    "decode": ("GB/s", "of read", "error"),
    "prefill": ("TFLOP/s", "error"),
    "store": ("GB/s", "of copy"),
}


def entries(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Who took part in a row: name -> what was measured, or why it failed."""
    return {name: value for name, value in row.items() if name not in _FIELDS}


def case_label(row: dict[str, Any]) -> str:
    """`64 x 8,192`, or `64 x 512 to 8,192` for ragged batches."""
    from_shortest = f"{row['shortest']:,} to " if row["ragged"] else ""
    return f"{row['batch']} x {from_shortest}{row['context']:,}"


def heads_label(row: dict[str, Any]) -> str:
    """`8 x 4 x 128`: KV heads, group and head size, and what else is special."""
    label = f"{row['kv_heads']} x {row['group']} x {row['head_size']}"
    label += " with sinks" if row["sinks"] else ""
    if window := row.get("sliding_window"):
        label += f", window {window:,}"
    tokens = row["query_tokens"]
    return label + (f", {tokens} query tokens" if row["kind"] == "decode" and tokens > 1 else "")


def console_tables(report: dict[str, Any]) -> Iterator[Table]:
    """One table per kind of case."""
    for kind in ("decode", "prefill", "store"):
        rows = [row for row in report["microseconds"] if row["kind"] == kind]
        if not rows:
            continue
        table = Table(box=None, pad_edge=False)
        headings = [kind, "", "single µs", "in a row µs", *_LAST_HEADINGS[kind]]
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="right" if i > 1 else "left", no_wrap=True)
        for row in rows:
            label = row["name"].removeprefix(f"{kind}-")
            for name, entry in entries(row).items():
                table.add_row(label, name, *_cells(kind, entry))
                label = ""
        yield table


def _cells(kind: str, entry: dict[str, Any]) -> list[str]:
    if "failed" in entry:
        return ["failed"]
    cells = [f"{entry['single']:,.1f}", f"{entry['back_to_back']:,.1f}"]
    if kind == "prefill":
        cells.append(f"{entry['teraflops_per_s']:,.2f}")
    elif "bytes" in entry:
        cells += [f"{entry['terabytes_per_s'] * 1e3:,.1f}", f"{entry['fraction']:.0%}"]
    else:
        cells += ["", ""]
    return [*cells, f"{entry['error']:.1e}"] if "error" in entry else cells


def markdown_table(report: dict[str, Any]) -> str:
    """The decode steps, single replays on halfbyte's NVFP4 cache beside FlashInfer's best."""
    lines = [
        "| sequences x context | KV heads x group x head size | halfbyte nvfp4 | FlashInfer fp8 "
        "| FlashInfer bf16 | halfbyte / bf16 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in report["microseconds"]:
        if row["kind"] != "decode" or row["name"] in WITHOUT_PEERS:
            continue
        times = [
            row.get(name, {}).get("single")
            for name in ("halfbyte_nvfp4", "flashinfer_fp8", "flashinfer_bf16")
        ]
        cells = [f"{time:.0f} µs" if time else "" for time in times]
        ratio = f"{times[0] / times[2]:.2f}" if times[0] and times[2] else ""
        lines.append(f"| {case_label(row)} | {heads_label(row)} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"
