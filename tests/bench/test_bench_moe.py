"""The MoE benchmark on a CPU, tiny."""

import json

import pytest
import torch

from bench.shared import RATE, TIMES, measure_quickly
from halfbyte.bench import MOE_SHAPES, MoeBenchmark, MoeShape
from halfbyte.bench.moe import RandomExperts
from halfbyte.cli.bench_arguments import parse_moe_shapes
from halfbyte.dispatch import NoImplementationError
from halfbyte.measure import timing
from halfbyte.moe.reference import ReferenceKernel

CPU = torch.device("cpu")
SMALL = [MoeShape(4, 2, 64, 32), MoeShape(3, 1, 64, 32, "mxfp4")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 2)
    monkeypatch.setattr("halfbyte.measure.report.bandwidths", lambda device: (0.02, 0.01))


def test_report_says_what_was_measured() -> None:
    benchmark = MoeBenchmark(CPU, SMALL, [1, 20, 1], ["reference"], torch.float32)
    for done, row in enumerate(benchmark.run(), start=1):
        assert len(benchmark.report["microseconds"]) == done
        assert benchmark.report["microseconds"][-1] is row
    report = json.loads(json.dumps(benchmark.report))
    assert report["backends"] == ["reference"]
    rows = report["microseconds"]
    assert [row["name"] for row in rows] == [
        "4x2x64x32 M=1",
        "4x2x64x32 M=20",
        "3x1x64x32-mxfp4 M=1",
        "3x1x64x32-mxfp4 M=20",
    ]
    for row in rows:
        assert list(row["contenders"]) == ["reference", "dense_bf16"]
        ours = row["contenders"]["reference"]
        assert set(ours) == {*TIMES, *RATE, "error", "allowed_error"}
        assert ours["error"] < 1e-5 < ours["allowed_error"] < 0.1
        assert set(row["contenders"]["dense_bf16"]) == {*TIMES, "error", "allowed_error"}
    one_token = 2 * (3 * 64 * 32 // 2 + 3 * 64 * 32 // 16)  # two experts
    assert rows[0]["contenders"]["reference"]["bytes"] == one_token
    assert rows[1]["contenders"]["reference"]["bytes"] == 2 * one_token


def test_by_default_our_own_backends_are_measured() -> None:
    backends = MoeBenchmark(CPU, SMALL, [1]).backends
    assert backends in (["cpu"], ["reference"])  # the latter where nothing was built
    with pytest.raises(NoImplementationError, match=r"needs an NVIDIA GPU|not on a GPU"):
        MoeBenchmark(CPU, SMALL, [1], ["triton"])


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_calls_hit_different_experts(shape: MoeShape) -> None:
    experts = RandomExperts(shape, CPU, torch.float32)
    ids = [ids for ids, _ in experts.routings(1)]
    assert len({tuple(one.flatten().sort()[0].tolist()) for one in ids}) > 1
    x = experts.x(5)
    first, second = (call() for call in experts.calls("reference", x)[:2])
    assert not torch.equal(first, second)


def test_copies_exceed_the_caches_by_what_one_token_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = RandomExperts(MoeShape(32, 2, 64, 32), CPU, torch.float32)
    monkeypatch.setitem(timing._ROTATED_BYTES, "cpu", 3 * experts.bytes_hit(1))
    first, *more = experts.forms("packed", lambda: experts.packed)
    assert first is experts.packed
    assert len(more) == 3
    for copy in more:
        assert torch.equal(copy.down.weight, first.down.weight)
        assert copy.down.weight.data_ptr() != first.down.weight.data_ptr()
    assert experts.forms("packed", lambda: None)[0] is first


def test_a_wrong_result_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceKernel.apply

    def wrong(*arguments: object) -> torch.Tensor:
        out = right(*arguments)  # type: ignore[arg-type]
        out[-1, -1] += 0.2 * out.abs().max()
        return out

    monkeypatch.setattr(ReferenceKernel, "apply", wrong)
    (row,) = MoeBenchmark(CPU, SMALL[:1], [3], ["reference"]).run()
    assert row["contenders"]["reference"]["failed"].startswith(
        "RuntimeError: wrong results: error "
    )
    assert row["contenders"]["dense_bf16"]["single"] > 0


def test_shapes_by_name_and_size() -> None:
    assert parse_moe_shapes("gpt-oss-20b, 16x2x64x32") == [
        MOE_SHAPES["gpt-oss-20b"],
        MoeShape(16, 2, 64, 32),
    ]
    for text, message in {
        "nonsense": "shapes: expected qwen3-30b-a3b, gpt-oss-20b, or experts x",
        "2x3x64x32": "shapes: expected top-k of 1 .. experts, got '2x3x64x32'",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_moe_shapes(text)
