"""The linear benchmark on a CPU, tiny, and the weights that it measures."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from bench.shared import TIMES, measure_quickly
from halfbyte.bench import LinearBenchmark
from halfbyte.bench.linear import LinearWeights
from halfbyte.dispatch import NoImplementationError
from halfbyte.linear.reference import ReferenceKernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 2)
    monkeypatch.setattr("halfbyte.measure.report.bandwidths", lambda device: (0.02, 0.01))


def test_report_says_what_was_measured() -> None:
    benchmark = LinearBenchmark(CPU, [(64, 48), (80, 32)], [1, 20, 1], ["reference"], torch.float32)
    for done, row in enumerate(benchmark.run(), start=1):
        assert len(benchmark.report["microseconds"]) == done
        assert benchmark.report["microseconds"][-1] is row
    report = json.loads(json.dumps(benchmark.report))
    assert report["read_terabytes_per_s"] == 0.02
    assert report["backends"] == ["reference"]
    assert report["dtype"] == "float32"
    rows = report["microseconds"]
    assert [(row["name"], row["shape"], row["n"], row["k"], row["m"]) for row in rows] == [
        ("64x48 M=1", "64x48", 64, 48, 1),
        ("64x48 M=20", "64x48", 64, 48, 20),
        ("80x32 M=1", "80x32", 80, 32, 1),
        ("80x32 M=20", "80x32", 80, 32, 20),
    ]
    for row in rows:
        assert list(row["contenders"]) == ["reference", "dense_bf16"]
        ours = row["contenders"]["reference"]
        assert set(ours) == {*TIMES, "error", "allowed_error"}
        assert ours["error"] < 1e-5 < ours["allowed_error"] < 0.05


def test_by_default_our_own_backends_are_measured() -> None:
    backends = LinearBenchmark(CPU, [(32, 32)], [1]).backends
    assert backends in (["cpu"], ["reference"])  # the latter where nothing was built


def test_a_failure_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceKernel, "process_weights_after_loading", lambda *_: 1 // 0)
    for row in LinearBenchmark(CPU, [(32, 32)], [1, 2], ["reference"]).run():
        assert row["contenders"]["reference"]["failed"].startswith("ZeroDivisionError: ")
        assert row["contenders"]["dense_bf16"]["single"] > 0


@pytest.mark.parametrize("value", [0.05, torch.nan])
def test_a_wrong_result_has_failed(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    right = ReferenceKernel.apply_weights

    def wrong(*arguments: object) -> torch.Tensor:
        out = right(*arguments)  # type: ignore[arg-type]
        out[-1, -1] += value * out.abs().max()
        return out

    monkeypatch.setattr(ReferenceKernel, "apply_weights", wrong)
    (row,) = LinearBenchmark(CPU, [(32, 32)], [3], ["reference"]).run()
    assert row["contenders"]["reference"]["failed"].startswith(
        "RuntimeError: wrong results: error "
    )


def test_errors_are_the_largest_of_all_rows() -> None:
    weights = LinearWeights((24, 64), CPU, torch.float32)
    x = weights.x(10)
    exact = x.double() @ weights.dense(torch.float64).t()
    dense = weights.dense(torch.bfloat16)
    off = exact.clone()
    off[9, 3] += 0.5 * exact.abs().max()
    nan = exact.clone()
    nan[4, 0] = torch.nan
    assert weights.error(x, exact)[0] < 1e-14
    assert weights.error(x, off)[0] == pytest.approx(0.5)
    assert math.isnan(weights.error(x, nan)[0])
    baseline = F.linear(x.bfloat16(), dense).double()
    expected = float((baseline - exact).abs().max() / exact.abs().max())
    assert weights.error(x, exact)[1] == pytest.approx(2 * expected + 1e-5)


def test_weights_are_the_same_in_every_form() -> None:
    weights = LinearWeights((32, 48), CPU, torch.float32)
    x = weights.x(5)
    dense = [call.args[1] for call in weights.dense_calls(x, torch.float64)]  # type: ignore[attr-defined]
    layers = [call.func for call in weights.calls("reference", x)]  # type: ignore[attr-defined]
    assert len(layers) > 1
    for layer in layers:
        assert torch.equal(layer.dequantize(torch.float64), dense[0])
    assert len({layer.weight.data_ptr() for layer in layers}) == len(layers)
    assert len({weight.data_ptr() for weight in dense}) == len(dense) > 1
    assert dense[0].isfinite().all()
    assert 0.4 < (dense[0] < 0).sum() / (dense[0] != 0).sum() < 0.6
    assert torch.equal(x, weights.x(5))
    assert x.shape == (5, 48)


def test_arguments_are_checked_first() -> None:
    for shapes, tokens, message in (
        ([(32, 40)], [1], "k a positive multiple of 16, got n=32, k=40"),
        ([(0, 32)], [1], "expected n >= 1"),
        ([(32, 32)], [0], "expected None or a number >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearBenchmark(CPU, shapes, tokens)
    with pytest.raises(NoImplementationError, match="unknown 'abacus'"):
        LinearBenchmark(CPU, backends=["abacus"])
    with pytest.raises(NoImplementationError, match="'cuda' cannot be used here"):
        LinearBenchmark(CPU, backends=["cuda"])


@pytest.mark.gpu
def test_benchmark_on_a_gpu() -> None:
    for row in LinearBenchmark(torch.device("cuda"), [(512, 1024)], [1, 300], ["cuda"]).run():
        for name in ("cuda", "dense_bf16"):
            assert "failed" not in row["contenders"][name], row["contenders"][name]
            assert row["contenders"][name]["single"] > 0
