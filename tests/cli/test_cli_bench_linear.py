"""`halfbyte bench linear`, as a user meets it on a CPU."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.cli import main
from halfbyte.cli.bench_arguments import parse_shapes

Command = Callable[..., tuple[int, str, str]]
TINY = ("--device", "cpu", "--shapes", "64x32,32x48", "--m", "1,20")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `halfbyte bench linear`: exit status, stdout, stderr."""
    monkeypatch.setattr("halfbyte.measure.timing.SINGLES", 2)
    monkeypatch.setattr("halfbyte.measure.timing.IN_A_ROW", 2)

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
    for part in ("64x32", "32x48", "M=20", "dense_bf16", " cpu ", "error"):
        assert part in out
    assert "reads" in out.splitlines()[-1]
    report = json.loads(file.read_text())
    assert len(report["microseconds"]) == 4
    assert max(map(len, out.splitlines()[:-1])) <= 90


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "expected the name of a regular file"),  # nobody reads it
        ("full", "cannot be written: No space left on device"),
    ],
)
def test_reports_go_to_files(bench: Command, tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").symlink_to("/dev/full")
    file = tmp_path / name
    code, _, err = bench(*TINY, "--out", str(file))
    assert (code, err) == (1, f"error: out: {file}: {reason}\n")


def test_prints_json(bench: Command) -> None:
    code, out, err = bench(*TINY, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["microseconds"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "shapes: expected N x K such as 6144x4096,4096x14336, got '64'"),
        (["--shapes", "64x20"], "k a positive multiple of 16, got n=64, k=20"),
        (["--m", "1,x"], "m: expected numbers separated by commas, got '1,x'"),
        (["--m", "0"], "m: expected at least 1, got 0"),
        (["--m", str(2**31)], "m: expected less than 2^31, got 2147483648"),
        (["--m", "9" * 5000], "m: expected less than 2^31, got 9999"),
        (["--shapes", "9" * 5000 + "x16"], "shapes: expected less than 2^31, got 9999"),
        (["--shapes", "0x16"], "shapes: expected at least 1, got 0"),
        (
            ["--shapes", "32x32", "--m", str(2**31 - 1)],
            "with M=2147483647 needs at least 256.0 GiB",
        ),
        (["--out", "/"], "out: /: expected the name of a regular file"),
        (["--out", "x" * 300], "File name too long"),
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
    monkeypatch.setattr("halfbyte.bench.linear.LinearWeights.error", lambda *_: (0.1, 0.01))
    code, out, err = bench(*TINY, "--backends", "reference")
    assert code == 1
    assert "64x32 M=1: reference: RuntimeError: wrong results: error 0.1, allowed 0.01" in err
    assert "failed" in out


def test_shapes_are_parsed() -> None:
    assert parse_shapes("6144x4096, 32 X 64") == [(6144, 4096), (32, 64)]
    for text in ("6144", "6144x", "1x2x3", "6144x4096,"):
        with pytest.raises(ValueError, match="shapes: expected N x K such as"):
            parse_shapes(text)
