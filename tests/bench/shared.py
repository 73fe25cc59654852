"""Helpers for tests of `halfbyte.bench` and of `benchmarks/`."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.measure import timing

TIMES = {"single", "back_to_back"}
RATE = {"bytes", "terabytes_per_s", "fraction"}


def measure_quickly(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Few calls on few copies of the data, without a garbage collection after each."""
    monkeypatch.setattr("halfbyte.measure.report.gc", SimpleNamespace(collect=lambda: 0))
    monkeypatch.setattr("halfbyte.measure.timing.SINGLES", calls)
    monkeypatch.setattr("halfbyte.measure.timing.IN_A_ROW", calls)
    monkeypatch.setitem(timing._ROTATED_BYTES, "cpu", 300_000)


def assert_sees_causally(case: Any, window: int | None) -> None:
    """A case counts the pairs and tokens that causal attention with a window sees."""
    case = replace(case, sliding_window=window)
    seen = [
        [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(n - case.query_tokens, n)]
        for n in case.lengths().tolist()
    ]
    assert case.pairs == sum(len(keys) for row in seen for keys in row)
    assert case.tokens_read == sum(len(set().union(*row)) for row in seen)


def assert_report_of_decode(benchmark: Any, case: Any, *fields_of_ours: str) -> dict[str, Any]:
    """The report of a run of 2 x 48 tokens with Llama's heads is complete.

    Returns:
        The entry of our kernel on an nvfp4 cache.
    """
    row = benchmark.run(case)
    report = json.loads(json.dumps(benchmark.report))
    assert list(report) == [
        "date",
        "gpu",
        "machine",
        "versions",
        "read_terabytes_per_s",
        "copy_terabytes_per_s",
        "microseconds",
    ]
    assert report["gpu"] is None
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert report["versions"]["torch"] == torch.__version__
    assert report["microseconds"] == [row]
    fields = asdict(case)
    assert {name: row[name] for name in fields} == fields
    assert set(row) - set(fields) == {"halfbyte_nvfp4", "halfbyte_fp8", "sdpa_bf16", "sdpa_fp32"}
    ours: dict[str, Any] = row["halfbyte_nvfp4"]
    assert set(ours) == {"error", *fields_of_ours, *TIMES, *RATE}
    assert ours["bytes"] == 96 * 8 * 2 * 72
    assert ours["terabytes_per_s"] == pytest.approx(
        ours["bytes"] / ours["back_to_back"] / 1e6, abs=1e-4
    )
    assert ours["error"] < 1e-5
    assert set(row["sdpa_fp32"]) == TIMES
    return ours
