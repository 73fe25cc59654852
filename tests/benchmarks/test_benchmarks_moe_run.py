"""Whole runs of the benchmark of experts, on a CPU, tiny, and `python -m benchmarks.moe`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.shared import TIMES, measure_quickly
from benchmarks import moe
from benchmarks.moe_layers.picture import LINES, draw
from benchmarks.moe_layers.run import MoeRun
from benchmarks.peers.moe import MOE_PEERS, MoePeer
from benchmarks.program import failures, to_json
from halfbyte.bench import MoeShape
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer, NoImplementationError
from halfbyte.moe import MoeConfig
from halfbyte.moe.reference import ReferenceKernel

CPU = torch.device("cpu")
SMALL = [MoeShape(4, 2, 64, 32), MoeShape(3, 1, 64, 32, "mxfp4")]
NO_GPU = dict.fromkeys(MOE_PEERS.names(), "needs an NVIDIA GPU")


class DensePeer(MoePeer):
    """Token by token on dequantized weights."""

    name = "vllm_bf16"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, "everywhere"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        return config.weight_format == "nvfp4", "NVFP4 alone"

    def prepare(self, experts: RandomExperts) -> Any:
        return experts.dense

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.float32, torch.int32, torch.float32)
        gate_up, down = (weight.float() for weight in form)
        both = torch.einsum("mnh,mh->mn", gate_up[ids.flatten()], x.repeat_interleave(2, 0))
        gate, up = both.chunk(2, -1)
        middle = torch.nn.functional.silu(gate) * up
        rows = torch.einsum("mhi,mi->mh", down[ids.flatten()], middle)
        return (rows.unflatten(0, ids.shape) * weights[..., None]).sum(1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 2)
    monkeypatch.setattr("halfbyte.measure.report.bandwidths", lambda device: (0.02, 0.01))


def run(shapes: list[MoeShape], tokens: tuple[int, ...] = (1, 20), **options: Any) -> MoeRun:
    benchmark = MoeRun(CPU, shapes, tokens, options.pop("backends", ["reference"]), **options)
    for done, row in enumerate(benchmark.run(), start=1):
        assert benchmark.report["microseconds"][-1] is row
        assert len(benchmark.report["microseconds"]) == done
    return benchmark


def test_report_says_what_was_measured_and_on_what() -> None:
    report = run(SMALL).report
    assert json.loads(to_json(report)) == report
    assert report["gpu"] is report["gpu_state"] is report["empty"] is None
    assert report["date"]
    assert report["machine"]["processor"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["judged_by"] == ["back_to_back", "single"]
    assert report["skipped"] == {str(shape): NO_GPU for shape in SMALL}
    rows = report["microseconds"]
    assert [(row["shape"], row["m"]) for row in rows] == [
        (str(s), m) for s in SMALL for m in (1, 20)
    ]
    assert [row["name"] for row in rows][:2] == ["4x2x64x32 M=1", "4x2x64x32 M=20"]
    one_expert = 3 * 64 * 32 // 2 + 3 * 64 * 32 // 16
    assert rows[0]["bytes_hit"] == 2 * one_expert
    assert rows[1]["bytes_hit"] == 4 * one_expert
    for row in rows:
        contenders = row["contenders"]
        assert list(contenders) == ["reference", "dense_bf16", "plain_read"]
        assert set(contenders["reference"]) == {*TIMES, "error", "allowed_error"}
        assert (
            0 < contenders["reference"]["error"] <= contenders["reference"]["allowed_error"] < 0.1
        )
        read = contenders["plain_read"]
        assert set(read) == {*TIMES, "bytes", "terabytes_per_s", "by"}
        assert read["bytes"] == row["bytes_hit"]
        assert read["terabytes_per_s"] == pytest.approx(
            read["bytes"] / read["back_to_back"] / 1e6, abs=1e-4
        )
        assert set(row) > {"selected", "single", "back_to_back", "in_graph"}
    assert report["seconds"] > 0


def test_our_cpu_kernel_is_beside_the_read() -> None:
    from halfbyte.kernels.cpu.library import is_built

    if not is_built("")[0]:
        pytest.skip("the CPU kernels were not built")
    (row,) = run(SMALL[1:], (4,), backends=["cpu"]).report["microseconds"]
    found, times = row["single"], row["contenders"]
    own = times["cpu"]["single"]
    assert times["cpu"]["error"] <= times["cpu"]["allowed_error"]
    assert found["ours_over_read"] == pytest.approx(own / times["plain_read"]["single"], abs=1e-3)
    assert found["ours_of_read_rate"] == pytest.approx(row["bytes_hit"] / own / 0.02e6, abs=1e-3)
    assert found["fastest_peer"] is None


def test_a_peer_that_can_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOE_PEERS._loaded, "vllm_bf16", DensePeer)
    report = run(SMALL, (5,), peers=["humming", "vllm_bf16"]).report
    of_nvfp4, of_mxfp4 = report["microseconds"]
    assert list(of_nvfp4["contenders"]) == ["reference", "vllm_bf16", "dense_bf16", "plain_read"]
    peer = of_nvfp4["contenders"]["vllm_bf16"]
    assert 0 < peer["error"] <= peer["allowed_error"]
    assert peer["single"] > 0
    assert "vllm_bf16" not in of_mxfp4["contenders"]
    skipped = {"humming": NO_GPU["humming"]}
    assert report["skipped"][str(SMALL[0])] == skipped
    assert report["skipped"][str(SMALL[1])] == skipped | {"vllm_bf16": "NVFP4 alone"}


def test_wrong_weights_of_a_peer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(DensePeer):
        def prepare(self, experts: RandomExperts) -> Any:
            gate_up, down = experts.dense
            return gate_up.roll(1, 0), down

    monkeypatch.setitem(MOE_PEERS._loaded, "vllm_bf16", Wrong)
    benchmark = run(SMALL[:1], (5,))
    (row,) = benchmark.report["microseconds"]
    message = row["contenders"]["vllm_bf16"]["failed"]
    assert message.startswith("RuntimeError: wrong results: error ")
    assert "single" not in row["contenders"]["vllm_bf16"]
    assert failures(benchmark.report, ours=True) == [f"4x2x64x32 M=5: vllm_bf16: {message}"]


def test_a_failure_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(DensePeer):
        def prepare(self, experts: RandomExperts) -> Any:
            raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(MOE_PEERS._loaded, "vllm_bf16", Fails)
    benchmark = run(SMALL[:1], (1,))
    (row,) = benchmark.report["microseconds"]
    assert row["contenders"]["vllm_bf16"] == {"failed": "RuntimeError: no kernel for this"}
    assert row["contenders"]["reference"]["single"] > 0
    assert len(failures(benchmark.report)) == 1
    assert failures(benchmark.report, ours=True) == []


def test_warm_up_calls_all_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    class Notes(DensePeer):
        def apply(self, form: Any, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
            called.append((form[0].shape[0], x.shape[0]))
            raise RuntimeError("the measurement will say so")

    monkeypatch.setitem(MOE_PEERS._loaded, "vllm_bf16", Notes)
    benchmark = MoeRun(
        CPU, [MoeShape(4, 2, 64, 32), MoeShape(3, 2, 64, 32)], [1, 20], ["reference"]
    )
    benchmark.warm_up()
    assert called == [(4, 1), (4, 20), (3, 1), (3, 20)]
    assert benchmark.report["microseconds"] == []


def test_unknown_names() -> None:
    with pytest.raises(NoImplementationError, match="MoE peer: unknown 'nobody'"):
        MoeRun(CPU, SMALL, [1], ["reference"], ["nobody"])


TINY = ("--device", "cpu", "--shapes", "4x2x64x32,3x1x64x32", "--m", "1,20")


def program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["moe.py", *arguments])
    moe.main()


def test_measures_and_then_writes_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, page = tmp_path / "moe.json", tmp_path / "page.md"
    page.write_text("before\n<!-- moe -->\nold\n<!-- /moe -->\nafter\n")
    monkeypatch.setattr(moe, "PAGE", page)
    program(monkeypatch, "--out", str(result), *TINY, "--backends", "reference")
    printed = capsys.readouterr()
    for part in ("4x2x64x32", "M 20", "dense_bf16", "plain_read", "humming: needs an NVIDIA GPU"):
        assert part in printed.out
    assert "s: 3x1x64x32 M=20\n" in printed.err
    program(monkeypatch, "--out", str(result), "--table")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2].startswith("| 4x2x64x32 | 1 | 0 | ")
    assert page.read_text() == f"before\n<!-- moe -->\n{printed.out}<!-- /moe -->\nafter\n"


def test_picture_shows_the_committed_run(tmp_path: Path) -> None:
    report = json.loads(moe.RESULT.read_text())
    committed = moe.PICTURE.read_text()
    assert f"]({moe.PICTURE.name})" in moe.PAGE.read_text()
    ran = {
        name
        for row in report["microseconds"]
        for name, times in row["contenders"].items()
        if "failed" not in times
    }
    labels = [label for name, label, _, _ in LINES if name in ran]
    assert {"cuda", "vllm_marlin", "plain_read"} <= ran
    shapes = {f"{row['shape']} ({report['gpu']})" for row in report["microseconds"]}
    pytest.importorskip("matplotlib")
    draw(report, tmp_path / "moe.svg")
    for svg in (committed, (tmp_path / "moe.svg").read_text()):
        assert all(f">{text}<" in svg for text in (*labels, *shapes, "8,192"))
    with pytest.raises(ValueError, match="the report has no times of cuda"):
        draw({**report, "microseconds": []}, tmp_path / "none.svg")


def test_wrong_results_end_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = ReferenceKernel.apply

    def wrong(*arguments: Any) -> torch.Tensor:
        out = right(*arguments)
        out[-1, -1] += 0.2 * out.abs().max()
        return out

    monkeypatch.setattr(ReferenceKernel, "apply", wrong)
    out = ("--out", str(tmp_path / "moe.json"), "--peers", "")
    with pytest.raises(SystemExit) as end:
        program(monkeypatch, *out, *TINY, "--backends", "reference")
    assert end.value.code == 1
    assert "4x2x64x32 M=1: reference: RuntimeError: wrong results: " in capsys.readouterr().err


def test_an_unknown_peer_is_an_error_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program(monkeypatch, "--out", str(tmp_path / "moe.json"), "--peers", "marlin", *TINY)
    assert end.value.code == 2
    assert "error: MoE peer: unknown 'marlin'; expected one of" in capsys.readouterr().err


@pytest.mark.gpu
def test_benchmark_on_a_gpu() -> None:
    """Every peer that is installed computes what the reference does."""
    shapes = [MoeShape(8, 2, 256, 128), MoeShape(4, 2, 192, 192, "mxfp4")]
    benchmark = MoeRun(torch.device("cuda"), shapes, [1, 40], ["triton", "cuda"])
    for row in benchmark.run():
        for name, entry in row["contenders"].items():
            assert "failed" not in entry, (name, entry)
            assert entry["graph"]
        assert 0 < row["contenders"]["plain_read"]["terabytes_per_s"] < 20
