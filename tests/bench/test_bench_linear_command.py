"""`halfbyte bench linear` and `benchmarks/linear.py`, as a user meets them on a CPU."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli import main

Command = Callable[..., tuple[int, str, str]]
TINY = ("--device", "cpu", "--shapes", "64x32,32x48", "--m", "1,20")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear.py"


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `halfbyte bench linear`: exit status, stdout, stderr."""
    monkeypatch.setattr("halfbyte.bench.timing._SINGLES", 2)
    monkeypatch.setattr("halfbyte.bench.timing._IN_A_ROW", 2)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfbyte", "bench", "linear", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code if isinstance(end.value.code, int) else 0, captured.out, captured.err

    return run


def test_prints_a_table_per_shape_and_writes_json(bench: Command, tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    code, out, err = bench(*TINY, "--out", str(file))
    assert (code, err) == (0, "")
    for part in ("64x32", "32x48", "M 20", "dense_bf16", "reference", "plain_read", "must hold"):
        assert part in out
    assert "reads" in out.splitlines()[-1]
    report = json.loads(file.read_text())
    assert len(report["microseconds"]) == 4
    assert report["seconds"] > 0


def test_prints_json(bench: Command) -> None:
    code, out, err = bench(*TINY, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["microseconds"]) == 4


def test_warm_up_measures_nothing(bench: Command) -> None:
    assert bench(*TINY, "--warm-up") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "shapes: expected N x K such as 6144x4096,4096x14336, got '64'"),
        (["--shapes", "64x20"], "K a multiple of 16, got 64x20"),
        (["--m", "1,x"], "m: expected numbers separated by commas, got '1,x'"),
        (["--m", "0"], "m: expected at least 1, got 0"),
        (["--backends", "abacus"], "linear backend: unknown 'abacus'"),
        (["--backends", "cuda"], "linear backend 'cuda' cannot be used here"),
        (["--out", "/no/such/folder/report.json"], "out: [Errno 2]"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input_is_one_line(bench: Command, arguments: list, message: str) -> None:
    code, out, err = bench("--device", "cpu", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_wrong_results_end_with_1(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.bench.linear_weights.Errors.allowed", 0.0)
    code, out, err = bench(*TINY, "--backends", "reference")
    assert code == 1
    assert "64x32 M=1: reference: wrong results: error " in err
    assert "failed" in out


def test_script_measures_and_then_writes_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, page = tmp_path / "linear.json", tmp_path / "page.md"
    page.write_text("before\n<!-- linear -->\nold\n<!-- /linear -->\nafter\n")
    script = runpy.run_path(str(SCRIPT))
    script_main = script["main"]
    monkeypatch.setitem(script_main.__globals__, "PAGE", page)
    out = ("--out", str(result))
    monkeypatch.setattr(sys, "argv", ["linear.py", *out, *TINY, "--backends", "reference"])
    with pytest.raises(SystemExit) as end:
        script_main()
    assert end.value.code in (0, None)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["linear.py", *out, "--table"])
    script_main()
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("| 64 x 32 | 1 | ")
    assert page.read_text() == f"before\n<!-- linear -->\n{printed}<!-- /linear -->\nafter\n"
