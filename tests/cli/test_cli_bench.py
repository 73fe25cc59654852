"""`halfbyte bench attention`, as a user meets it on a CPU."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from halfbyte.bench import Case
from halfbyte.cli import main
from halfbyte.cli.bench_arguments import choose_cases, default_cases, grid
from halfbyte.cli.bench_tables import tables

Command = Callable[..., tuple[int, str, str]]
TINY = ("--device", "cpu", "--batch", "1,2", "--context", "40")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `halfbyte bench attention`: exit status, stdout, stderr."""
    monkeypatch.setattr("halfbyte.measure.timing.SINGLES", 2)
    monkeypatch.setattr("halfbyte.measure.timing.IN_A_ROW", 2)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfbyte", "bench", "attention", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code if isinstance(end.value.code, int) else 0, captured.out, captured.err

    return run


def test_prints_a_table_per_kind_and_the_machine(bench: Command) -> None:
    code, out, err = bench(*TINY, "--heads", "gemma", "--kv-cache-dtype", "nvfp4, fp8")
    assert (code, err) == (0, "")
    for part in ("decode ", "prefill ", "store ", "gemma-2x40", "halfbyte_fp8", "GB/s", "TFLOP/s"):
        assert part in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 90
    assert "sdpa_bf16" in out
    last = out.splitlines()[-1]
    assert "reads" in last
    assert "copies" in last


def test_writes_json(bench: Command, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--only", "decode-llama-1", "--no-peers", "--out", str(report))
    code, _, err = bench(*TINY, *arguments)
    assert (code, err) == (0, "")
    (row,) = json.loads(report.read_text())["microseconds"]
    assert row["name"] == "decode-llama-1x40"
    assert [name for name in row if "_" in name and isinstance(row[name], dict)] == [
        "halfbyte_nvfp4"
    ]


def test_prints_json(bench: Command) -> None:
    code, out, err = bench(*TINY, "--only", "decode-llama-1", "--no-peers", "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["microseconds"]
    assert row["name"] == "decode-llama-1x40"


def test_ours_that_fails_ends_with_1_after_the_rest(
    bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("halfbyte.bench.attention_calls.paged_attention", fail)
    report = tmp_path / "report.json"
    code, out, err = bench(*TINY, "--only", "decode", "--out", str(report))
    assert code == 1
    assert err.count("\n") == 2
    assert "decode-llama-2x40: halfbyte_nvfp4: RuntimeError: out of order" in err
    assert "sdpa_bf16" in out
    assert len(json.loads(report.read_text())["microseconds"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device: expected auto, cuda or cpu, got 'tpu'"),
        (["--only", "nothing"], "only: 'nothing' matches none of"),
        (["--batch", "1,x"], "batch: expected numbers separated by commas, got '1,x'"),
        (["--context", "0"], "context: expected at least 1"),
        (["--context", str(2**40)], "context: expected less than 2^31, got 1099511627776"),
        (
            ["--context", str(2**30), "--only", "decode", "--device", "cpu"],
            "context, batch, heads: decode-llama-1x1073741824 needs at least 1,024.0 GiB, the cpu",
        ),
        (["--heads", "bloom"], "heads: unknown 'bloom'"),
        (["--kv-cache-dtype", "int3"], "unknown 'int3'"),
        (["--device", "cpu", "--attention-backend", "zz"], "attention backend: unknown 'zz'"),
        (["--device", "cpu", "--attention-backend", "cuda"], "'cuda' cannot be used here"),
        (["--out", "/no/such/folder/report.json", "--device", "cpu"], "out: [Errno 2]"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_line(
    bench: Command,
    arguments: list,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = bench(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # no file that says nothing


def test_usage_error_is_2(bench: Command) -> None:
    assert bench("--nonsense")[0] == 2


def test_grid_has_every_kind_at_every_point() -> None:
    cases = grid(["llama", "gpt-oss"], [1, 2], [16, 32])
    names = {case.name for case in cases}
    assert len(cases) == len(names) == 8 + 8 + 6  # 1 x 32 and 2 x 16 store the same
    assert {"decode-gpt-oss-2x16", "prefill-llama-1x32-on-0", "store-llama-64"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["bloom"], [1], [1]), "heads: unknown 'bloom'; expected one of llama, gpt-oss, gemma"),
        ((["llama"], [0], [1]), "batch: expected at least 1"),
        ((["llama"], [1], [-5]), "context: expected at least 1"),
    ],
    ids=["heads", "batch", "context"],
)
def test_grid_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(*arguments)


def test_select_by_regular_expression() -> None:
    def select(only: str | None) -> list[Case]:
        return choose_cases("cuda", only, None, None, None)

    assert select(None) == default_cases("cuda")
    assert [case.name for case in select("gpt-oss-6|^store.*64$")] == [
        "decode-gpt-oss-64x8192",
        "store-llama-64",
    ]
    with pytest.raises(ValueError, match="matches none of decode-llama-64x8192, "):
        select("nothing")
    with pytest.raises(ValueError, match="is not a regular expression"):
        select("(")


def test_widest_rows_fit_90_columns() -> None:
    names = [case.name for case in default_cases("cuda")]
    entry = {"single": 1e4, "back_to_back": 1e4, "terabytes_per_s": 4.0, "fraction": 1.0}
    rows = [
        {"name": name, "kind": name.split("-")[0], "halfbyte_nvfp4": {**entry, "error": 3e-3}}
        for name in names
    ]
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables({"microseconds": rows}):
            console.print(table)
    assert max(len(line.rstrip()) for line in captured.get().splitlines()) <= 90
