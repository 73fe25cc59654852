"""`python -m benchmarks.linear`, on a CPU."""

import sys
from pathlib import Path

import pytest

from bench.shared import measure_quickly
from benchmarks import linear

TINY = ("--device", "cpu", "--shapes", "64x32,32x48", "--m", "1,20")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 2)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["linear.py", *arguments])
    linear.main()


def test_measures_and_then_writes_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, page = tmp_path / "linear.json", tmp_path / "page.md"
    page.write_text("before\n<!-- linear -->\nold\n<!-- /linear -->\nafter\n")
    monkeypatch.setattr(linear, "PAGE", page)
    run(monkeypatch, "--out", str(result), *TINY, "--backends", "reference")
    printed = capsys.readouterr().out
    for part in ("64x32", "32x48", "M 20", "dense_bf16", "reference", "plain_read", "must hold"):
        assert part in printed
    run(monkeypatch, "--out", str(result), "--table")
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("| 64 x 32 | 1 | ")
    assert page.read_text() == f"before\n<!-- linear -->\n{printed}<!-- /linear -->\nafter\n"


def test_warm_up_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("halfbyte.measure.report.bandwidths", lambda device: 1 / 0)
    run(monkeypatch, *TINY, "--warm-up", "--out", str(tmp_path / "linear.json"))
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_wrong_results_end_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("halfbyte.bench.linear.LinearWeights.error", lambda *_: (0.1, 0.01))
    out = ("--out", str(tmp_path / "linear.json"))
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *out, *TINY, "--backends", "reference")
    assert end.value.code == 1
    assert "64x32 M=1: reference: wrong results: error 0.1 " in capsys.readouterr().err
