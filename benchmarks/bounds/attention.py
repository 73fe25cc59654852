"""Bounds on attention, on GPUs and CPUs, alone and in a decode step."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bounds.base import Bound

Rows = dict[str, dict[str, Any]]
_OF_FLASHINFER = {
    "llama-64x8192": 0.37,
    "llama-8x32768": 0.40,
    "llama-1x131072": 0.45,
    "llama-128x1024": 0.40,
    "gpt-oss-64x8192": 0.45,
}
"""Max time relative to FlashInfer on an unquantized cache."""
_FIRST = "decode-llama-64x8192"


def of_decode_run(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `attention_decode.json`."""
    rows: Rows = {row["name"]: row for row in report["microseconds"]}
    bound = partial(Bound, "attention_decode")
    for name, limit in _OF_FLASHINFER.items():
        ours, theirs = (
            rows[f"decode-{name}"][x]["single"] for x in ("halfbyte_nvfp4", "flashinfer_bf16")
        )
        yield bound(f"{name}: of FlashInfer bf16", ours / theirs, "<=", limit)
    for name in (_FIRST, "decode-llama-8x32768"):
        floor = rows[name]["halfbyte_fp8"]["bytes"] / report["read_terabytes_per_s"] / 1e6
        time = rows[name]["halfbyte_nvfp4"]["single"]
        yield bound(f"{name}: µs, of reading fp8", time, "<", floor)
    yield from _of_shapes(rows)
    yield from _of_ragged(rows)
    yield from _of_errors(rows)
    yield from _of_store(report, rows)
    yield from _of_prefill(rows)


def _rate(row: dict[str, Any]) -> float:
    """Bytes per µs of a single replay."""
    return float(row["halfbyte_nvfp4"]["bytes"] / row["halfbyte_nvfp4"]["single"])


def _of_shapes(rows: Rows) -> Iterator[Bound]:
    """Variants that read as many bytes: larger heads, larger pages, one KV head, more queries."""
    base, bound = rows[_FIRST], partial(Bound, "attention_decode")
    size = base["halfbyte_nvfp4"]["bytes"]
    for name in ("wide", "long-pages", "mqa", "speculative", "gemma"):
        alike = [
            row
            for row in rows.values()
            if row["name"].startswith(f"decode-{name}-") and row["halfbyte_nvfp4"]["bytes"] == size
        ]
        yield bound(f"{name}: cases of as many bytes", len(alike), "==", 1)
        yield bound(f"{name}: of the first's rate", _rate(alike[0]) / _rate(base), ">=", 0.7)


def _of_ragged(rows: Rows) -> Iterator[Bound]:
    """Log-uniform lengths, also within a factor of 16."""
    bound = partial(Bound, "attention_decode")
    ragged = [row for row in rows.values() if row["ragged"]]
    near = [row for row in ragged if 16 * row["shortest"] == row["context"]]
    yield bound("ragged cases", len(ragged), "==", 6)
    yield bound("ragged cases of a sixteenth", len(near), "==", 3)
    for row in near:
        rate = _rate(row) / _rate(rows[_FIRST])
        yield bound(f"{row['name']}: of the first's rate", rate, ">=", 1 / 1.3)
    for row in ragged:
        ours = row["halfbyte_nvfp4"]
        ratio = ours["back_to_back"] / ours["evened_out"]["back_to_back"]
        yield bound(f"{row['name']}: of even lengths", ratio, "<=", 1.15)


def _of_errors(rows: Rows) -> Iterator[Bound]:
    """At most twice bfloat16's error, and no NaN; counted, because `max` may drop a NaN."""
    entries = [
        entry
        for row in rows.values()
        for name, entry in row.items()
        if name.startswith("halfbyte_") and "error" in entry
    ]
    beyond = sum(not entry["error"] <= 2 * entry["bfloat16_error"] for entry in entries)
    yield Bound("attention_decode", "entries with an error", len(entries), ">", 60)
    yield Bound("attention_decode", "entries beyond twice bfloat16's error", beyond, "==", 0)


def _of_store(report: dict[str, Any], rows: Rows) -> Iterator[Bound]:
    bound = partial(Bound, "attention_decode")
    many, few = (rows[f"store-llama-{tokens}"]["halfbyte_nvfp4"] for tokens in (8192, 64))
    rate = many["bytes"] / many["single"] / 1e6
    yield bound("store 8192: of a copy", rate / report["copy_terabytes_per_s"], ">=", 0.5)
    yield bound("store 8192: of a copy, in a row", many["fraction"], ">=", 0.5)
    yield bound("store 64: µs", max(few["single"], few["in_graph"]), "<", 5)


def _of_prefill(rows: Rows) -> Iterator[Bound]:
    bound = partial(Bound, "attention_decode")
    for cached in (0, 32768):
        name = f"prefill-llama-4x2048-on-{cached}"
        peers = ("flashinfer_fa2_bf16", "flashinfer_fa3_bf16", "sdpa_bf16")
        ours, best = (
            rows[name]["halfbyte_nvfp4"],
            min(rows[name][peer]["single"] for peer in peers),
        )
        yield bound(f"{name}: of the fastest peer", ours["single"] / best, "<=", 1.15)
        yield bound(f"{name}: GiB of workspace", ours["workspace_bytes"] / 2**30, "<=", 1)


CPU_RUNS = ("attention_cpu", "attention_cpu_busy_xeon", "attention_cpu_zen4")


def of_cpu_run(run: str, report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of the runs in `CPU_RUNS`: their first two cases."""
    for row in report["milliseconds"][:2]:
        sdpa = min(time for key, time in row.items() if key.startswith("sdpa"))
        ours = min(time for key, time in row.items() if key.startswith("halfbyte_avx512"))
        name = f"{row['batch']}x{row['context']}: SDPA, of ours"
        yield Bound(run, name, sdpa / ours, ">=", 2.5)


def of_decode_step(report: dict[str, Any]) -> Iterator[Bound]:
    """A decode step becomes faster by the time that attention saves."""
    steps = {step["kv_cache_dtype"]: step for step in report["steps"]}
    ours, unquantized = steps["nvfp4"], steps["bfloat16"]
    saved = unquantized["attention_ms"] - ours["attention_ms"]
    gained = unquantized["step_ms"] - ours["step_ms"]
    yield Bound("decode_step", "ms that attention saves", saved, ">", 0)
    yield Bound("decode_step", "ms gained, of those saved", gained / saved, ">=", 0.9)
