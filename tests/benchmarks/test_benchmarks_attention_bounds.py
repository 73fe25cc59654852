"""What attention must hold, in the committed runs."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Rows = dict[str, dict[str, Any]]


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return result("attention_decode")


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> Rows:
    return {row["name"]: row for row in report["microseconds"]}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama-64x8192", 0.37),
        ("llama-8x32768", 0.40),
        ("llama-1x131072", 0.45),
        ("llama-128x1024", 0.40),
        ("gpt-oss-64x8192", 0.45),
    ],
)
def test_decode_beside_flashinfer_on_an_unquantized_cache(
    rows: Rows, name: str, most: float
) -> None:
    row = rows[f"decode-{name}"]
    assert row["halfbyte_nvfp4"]["single"] <= most * row["flashinfer_bf16"]["single"]


@pytest.mark.parametrize("name", ["decode-llama-64x8192", "decode-llama-8x32768"])
def test_decode_takes_less_than_the_bytes_of_an_fp8_cache(
    report: dict[str, Any], rows: Rows, name: str
) -> None:
    fp8_bytes = rows[name]["halfbyte_fp8"]["bytes"]
    floor = fp8_bytes / report["read_terabytes_per_s"] / 1e6
    assert rows[name]["halfbyte_nvfp4"]["single"] < floor


def rate(row: dict[str, Any]) -> float:
    """Bytes per µs of a single replay."""
    return row["halfbyte_nvfp4"]["bytes"] / row["halfbyte_nvfp4"]["single"]


@pytest.mark.parametrize("name", ["wide", "long-pages", "mqa", "speculative", "gemma"])
def test_no_shape_is_far_below_the_rate_of_the_first(rows: Rows, name: str) -> None:
    """Each with as many bytes: wider heads, longer pages, one KV head, more queries, and all."""
    base = rows["decode-llama-64x8192"]
    size = base["halfbyte_nvfp4"]["bytes"]
    alike = [
        row
        for row in rows.values()
        if row["name"].startswith(f"decode-{name}-") and row["halfbyte_nvfp4"]["bytes"] == size
    ]
    assert len(alike) == 1
    assert rate(alike[0]) >= 0.7 * rate(base)


def test_ragged_batches_are_near_the_rate_of_the_first(rows: Rows) -> None:
    """Log-uniform lengths of which the shortest are a sixteenth of the longest."""
    ragged = [
        row for row in rows.values() if row["ragged"] and 16 * row["shortest"] == row["context"]
    ]
    assert len(ragged) == 3
    for row in ragged:
        assert rate(row) >= rate(rows["decode-llama-64x8192"]) / 1.3


def test_ragged_batches_take_little_longer_than_even_ones(rows: Rows) -> None:
    ragged = [row["halfbyte_nvfp4"] for row in rows.values() if row["ragged"]]
    assert len(ragged) == 6
    for ours in ragged:
        assert ours["back_to_back"] <= 1.15 * ours["evened_out"]["back_to_back"]


def test_errors_are_those_of_bfloat16(rows: Rows) -> None:
    ours = [
        entry
        for row in rows.values()
        for name, entry in row.items()
        if name.startswith("halfbyte_") and "error" in entry
    ]
    assert len(ours) > 60
    for entry in ours:
        assert entry["error"] <= 2 * entry["bfloat16_error"]


def test_store(report: dict[str, Any], rows: Rows) -> None:
    many = rows["store-llama-8192"]["halfbyte_nvfp4"]
    assert many["bytes"] / many["single"] / 1e6 >= 0.5 * report["copy_terabytes_per_s"]
    assert many["fraction"] >= 0.5
    few = rows["store-llama-64"]["halfbyte_nvfp4"]
    assert max(few["single"], few["in_graph"]) < 5


@pytest.mark.parametrize("cached", [0, 32768])
def test_prefill_beside_the_fastest_peer(rows: Rows, cached: int) -> None:
    row = rows[f"prefill-llama-4x2048-on-{cached}"]
    peers = [row[f"{name}_bf16"] for name in ("flashinfer_fa2", "flashinfer_fa3", "sdpa")]
    ours = row["halfbyte_nvfp4"]
    assert ours["single"] <= 1.15 * min(peer["single"] for peer in peers)
    assert ours["workspace_bytes"] <= 2**30


@pytest.mark.parametrize("name", ["attention_cpu", "attention_cpu_busy_xeon", "attention_cpu_zen4"])
def test_cpu_beside_sdpa(name: str) -> None:
    for row in result(name)["milliseconds"][:2]:
        sdpa = min(time for key, time in row.items() if key.startswith("sdpa"))
        ours = min(time for key, time in row.items() if key.startswith("halfbyte_avx512"))
        assert sdpa >= 2.5 * ours


def test_a_decode_step_gains_what_attention_saves() -> None:
    steps = {step["kv_cache_dtype"]: step for step in result("decode_step")["steps"]}
    ours, unquantized = steps["nvfp4"], steps["bfloat16"]
    saved = unquantized["attention_ms"] - ours["attention_ms"]
    assert unquantized["step_ms"] - ours["step_ms"] >= 0.9 * saved > 0
