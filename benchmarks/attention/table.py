"""The decode steps of a run as a table in Markdown."""

from typing import Any

from benchmarks.attention.cases import WITHOUT_PEERS


def case_label(row: dict[str, Any]) -> str:
    """`64 x 8,192`, or `64 x 512 to 8,192` for ragged batches."""
    from_shortest = f"{row['shortest']:,} to " if row["ragged"] else ""
    return f"{row['batch']} x {from_shortest}{row['context']:,}"


def heads_label(row: dict[str, Any]) -> str:
    """`8 x 4 x 128`: KV heads, group and head size, and other properties of the case."""
    label = f"{row['kv_heads']} x {row['group']} x {row['head_size']}"
    label += " with sinks" if row["sinks"] else ""
    if window := row.get("sliding_window"):
        label += f", window {window:,}"
    tokens = row["query_tokens"]
    return label + (f", {tokens} query tokens" if row["kind"] == "decode" and tokens > 1 else "")


def markdown_table(report: dict[str, Any]) -> str:
    """Decode steps: single replays of halfbyte on its NVFP4 cache, and FlashInfer's best."""
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
