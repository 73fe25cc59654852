"""Whole runs of the linear benchmark with all backends, on a CPU, tiny."""

import json
from typing import Any

import pytest
import torch

from bench.shared import TIMES, measure_quickly
from benchmarks.linear import RESULT
from benchmarks.linear_layers.plain_read import compile_read, plain_read
from benchmarks.linear_layers.run import LinearRun
from benchmarks.linear_layers.table import linear_markdown_table, linear_tables
from benchmarks.linear_layers.warm_up import compile_ahead, warm_up
from benchmarks.program import failures, to_json
from halfbyte.linear.reference import ReferenceKernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 2)
    monkeypatch.setattr("halfbyte.measure.report.bandwidths", lambda device: (0.02, 0.01))


def run(*shapes: tuple[int, int], rows: tuple[int, ...] = (1, 20), **options: Any) -> dict:
    benchmark = LinearRun(CPU, shapes, rows, dtype=torch.float32, **options)
    for done, row in enumerate(benchmark.run(), start=1):
        assert benchmark.report["microseconds"][-1] is row
        assert len(benchmark.report["microseconds"]) == done
    return benchmark.report


def test_report_says_what_was_measured_and_on_what() -> None:
    report = run((64, 48), (80, 32), backends=["reference", "reference"])
    assert json.loads(to_json(report)) == report
    committed = json.loads(RESULT.read_text())
    assert set(report) == set(committed)
    assert set(report["microseconds"][0]) == set(committed["microseconds"][0])
    assert report["gpu"] is report["gpu_state"] is report["warm_up"] is None
    assert report["versions"]["humming"] is None
    assert report["unusable"]["cuda"] == "needs an NVIDIA GPU"
    assert report["read_terabytes_per_s"] == 0.02
    assert report["backends"] == ["reference"]
    rows = report["microseconds"]
    assert [(row["shape"], row["n"], row["k"], row["m"]) for row in rows] == [
        ("64x48", 64, 48, 1),
        ("64x48", 64, 48, 20),
        ("80x32", 80, 32, 1),
        ("80x32", 80, 32, 20),
    ]
    few, many = rows[0]["contenders"], rows[1]["contenders"]
    assert list(few) == ["reference", "dense_bf16", "dense_fp32", "plain_read"]
    assert set(few) - set(many) == {"plain_read"}
    assert set(few["reference"]) == {*TIMES, "error", "allowed_error"}
    assert few["reference"]["error"] < 1e-5 < few["reference"]["allowed_error"] < 0.05
    read = few["plain_read"]
    assert set(read) == {*TIMES, "bytes", "terabytes_per_s", "by"}
    assert read["bytes"] == 64 * 24 + 64 * 3
    assert read["terabytes_per_s"] == pytest.approx(
        read["bytes"] / read["back_to_back"] / 1e6, abs=1e-4
    )
    assert read["by"] == "torch.sum"
    over = rows[0]["single"]
    assert over["fastest"] == "reference"
    assert (over["selected_over_dense"] is None) == (rows[0]["selected"] != "reference")
    assert report["seconds"] > 0


def test_slow_backends_are_measured_for_few_tokens() -> None:
    (few, many) = run((32, 32), rows=(16, 17))["microseconds"]
    assert "reference" in few["contenders"]
    assert "reference" not in many["contenders"]
    (many,) = run((32, 32), rows=(17,), backends=["reference"])["microseconds"]
    assert "reference" in many["contenders"]


def test_a_failure_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(ReferenceKernel, "apply_weights", fails)
    benchmark = LinearRun(CPU, [(32, 32)], [1], ["reference"])
    (row,) = benchmark.run()
    assert row["contenders"]["reference"] == {"failed": "RuntimeError: no kernel for this"}
    assert row["contenders"]["dense_bf16"]["single"] > 0
    expected = ["32x32 M=1: reference: RuntimeError: no kernel for this"]
    assert failures(benchmark.report) == failures(benchmark.report, ours=True) == expected
    assert "failed" in printed(benchmark.report)
    # A layer that cannot even be made.
    monkeypatch.setattr(ReferenceKernel, "process_weights_after_loading", lambda *_: 1 // 0)
    benchmark = LinearRun(CPU, [(32, 32)], [1, 2], ["reference"])
    for row in benchmark.run():
        assert row["contenders"]["reference"]["failed"].startswith("ZeroDivisionError: ")
        assert row["contenders"]["plain_read"]["single"] > 0


@pytest.mark.parametrize("value", [0.05, torch.nan])
def test_a_wrong_result_has_failed_loudly(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    right = ReferenceKernel.apply_weights

    def wrong(*arguments: Any) -> torch.Tensor:
        out = right(*arguments)
        out[-1, -1] += value * out.abs().max()
        return out

    # A peer's results count as much as ours.
    monkeypatch.setattr(ReferenceKernel, "apply_weights", wrong)
    monkeypatch.setattr("benchmarks.linear_layers.run.OURS", ())
    benchmark = LinearRun(CPU, [(32, 32)], [3], ["reference"])
    (row,) = benchmark.run()
    message = row["contenders"]["reference"]["failed"]
    assert message.startswith("wrong results: error ")
    assert "single" not in row["contenders"]["reference"]
    assert len(failures(benchmark.report, ours=True)) == 1


def test_plain_read_reads_every_byte_of_different_data() -> None:
    by, calls = plain_read(64_000, CPU)
    assert by == "torch.sum"
    sums = [float(call()) for call in calls]
    assert len(set(sums)) == len(calls) > 1


def test_the_reading_kernel_compiles_without_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for architecture in ("sm_80", "sm_90", "sm_120"):
        assert compile_read(architecture)[:4] == b"\x7fELF"


def test_warm_up_tells_what_did_not_compile() -> None:
    warm_up([(32, 32)], [1, 3], ["reference"], CPU, torch.float32)
    message = r"32x32: cuda: NoImplementationError.*; 16x32: cuda: NoImpl"
    with pytest.raises(RuntimeError, match=message):
        warm_up([(32, 32), (16, 32)], [1], ["cuda", "reference"], CPU, torch.float32)


def test_compiling_ahead_happens_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    nothing = compile_ahead([(32, 32)], [1], ["cuda", "reference"], lambda: called.append(1))
    assert nothing["failed"] == []
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to warm up")
    found = compile_ahead([(32, 32)], [1], ["humming"], lambda: called.append(2))
    assert called == [1, 2]
    (message,) = found["failed"]
    assert "linear backend 'humming' cannot be used here" in message
    assert message.endswith("(status 1)")
    monkeypatch.setattr("benchmarks.linear_layers.warm_up._TIMEOUT", 0.0)
    found = compile_ahead([(32, 32)], [1], ["humming"], lambda: None)
    assert found["failed"] == ["not done after 0 s"]


def printed(report: dict) -> str:
    from rich.console import Console

    console = Console(width=130)
    with console.capture() as captured:
        for table in linear_tables(report):
            console.print(table)
    return captured.get()


def test_tables_show_the_run() -> None:
    report = run((32, 32), rows=(1, 20))
    text = printed(report)
    for part in ("32x32", "M 20", "reference", "plain_read", "selected / fastest <= 1.10"):
        assert part in text
    assert "…" not in text
    lines = linear_markdown_table(report).splitlines()
    assert len(lines) == 3  # 20 is not one of the numbers shown
    assert lines[2].startswith("| 32 x 32 | 1 | ")


@pytest.mark.gpu
def test_benchmark_on_a_gpu() -> None:
    benchmark = LinearRun(torch.device("cuda"), [(512, 1024)], [1, 300], ["cuda"])
    for row in benchmark.run():
        for name in ("cuda", "dense_bf16"):
            assert "failed" not in row["contenders"][name], row["contenders"][name]
            assert row["contenders"][name]["graph"]
    read = benchmark.report["microseconds"][0]["contenders"]["plain_read"]
    assert 0 < read["terabytes_per_s"] < 20
    assert benchmark.report["bounds"]
