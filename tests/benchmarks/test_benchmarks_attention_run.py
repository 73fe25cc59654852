"""Whole runs with peers on a CPU, tiny; FlashInfer's entries stand in as documented."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import halfbyte.bench
from attention.documented_flashinfer import DecodeWrapper, install
from bench.shared import assert_report_of_decode, measure_quickly
from benchmarks.attention.cases import Case, decode, ragged
from benchmarks.attention.picture import draw
from benchmarks.attention.run import AttentionRun
from benchmarks.attention.table import markdown_table
from benchmarks.peers import flashinfer
from halfbyte.bench import data
from halfbyte.bench.cases import prefill, store

AnyCase = TypeVar("AnyCase", bound=halfbyte.bench.Case)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch, 3)


def with_flashinfer(monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> AttentionRun:
    install(monkeypatch)
    benchmark = AttentionRun(CPU, dtypes or ("nvfp4",), query_dtype=torch.float32)
    benchmark.with_flashinfer = True
    return benchmark


def windowed(case: AnyCase) -> AnyCase:
    return replace(case, sliding_window=5)


def test_report_says_what_was_measured_and_on_what() -> None:
    benchmark = AttentionRun(CPU, ("nvfp4", "fp8", "nvfp4"), query_dtype=torch.float32)
    ours = assert_report_of_decode(benchmark, decode("llama", 2, 48), "backend", "bfloat16_error")
    assert ours["error"] < 2 * ours["bfloat16_error"]


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (decode("llama", 2, 40), {"flashinfer_nvfp4", "flashinfer_fp8", "flashinfer_bf16"}),
        (ragged("llama", 3, 90), {"flashinfer_nvfp4", "flashinfer_bf16"}),
        (decode("gpt-oss", 2, 40), {"flashinfer_bf16"}),
        (decode("gemma", 2, 40), {"flashinfer_bf16"}),
        (prefill("llama", 2, 20, 12), {"flashinfer_fa2_bf16", "flashinfer_fa3_bf16"}),
        (windowed(decode("mistral", 2, 40)), {"flashinfer_bf16"}),
        (windowed(prefill("mistral", 2, 20, 12)), {"flashinfer_fa2_bf16", "flashinfer_fa3_bf16"}),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_flashinfer_is_handed_the_same_work(
    monkeypatch: pytest.MonkeyPatch, case: Case, names: set
) -> None:
    row = with_flashinfer(monkeypatch).run(case)
    assert names <= set(row)
    for name in names:
        assert "failed" not in row[name], row[name]
        # As documented, it computes in float64 and rounds to the query's dtype, float32 here.
        assert row[name]["error"] < 1e-6


def test_only_some_pairs_of_format_and_head_size_are_compiled() -> None:
    assert flashinfer.formats(store("llama", 4)) == ()
    assert flashinfer.formats(decode("gemma", 1, 4)) == ("bfloat16",)


def test_a_peer_that_fails_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = with_flashinfer(monkeypatch)
    run = DecodeWrapper.run

    def fails_on_fp8(self: DecodeWrapper, q: Any, cache: Any, **options: Any) -> Any:
        if cache[0].dtype == torch.float8_e4m3fn:
            raise RuntimeError("no kernel\nfor this")
        return run(self, q, cache, **options)

    monkeypatch.setattr(DecodeWrapper, "run", fails_on_fp8)
    row = benchmark.run(decode("llama", 1, 20))
    assert row["flashinfer_fp8"] == {"failed": "RuntimeError: no kernel for this"}
    for name in ("halfbyte_nvfp4", "flashinfer_nvfp4", "flashinfer_bf16", "sdpa_bf16"):
        assert row[name]["single"] > 0


def test_table_and_picture_show_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = with_flashinfer(monkeypatch)
    for case in (decode("llama", 2, 40), ragged("gpt-oss", 2, 70), store("llama", 9)):
        benchmark.run(case)
    rows = benchmark.report["microseconds"]
    times = [rows[0][name]["single"] for name in ("halfbyte_nvfp4", "flashinfer_fp8")]
    ours = rows[1]["halfbyte_nvfp4"]["single"]
    lines = markdown_table(benchmark.report).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith(f"| 2 x 40 | 8 x 4 x 128 | {times[0]:.0f} µs | {times[1]:.0f} µs | ")
    peer = rows[1]["flashinfer_bf16"]["single"]
    assert lines[3] == (
        f"| 2 x 64 to 70 | 8 x 8 x 64 with sinks | {ours:.0f} µs |  | {peer:.0f} µs "
        f"| {ours / peer:.2f} |"
    )
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    draw(benchmark.report, picture)
    svg = picture.read_text()
    for part in (
        ">2 x 40<",
        ">2 x 64<",
        ">to 70<",
        ">with sinks<",
        f">{ours:.0f}<",
        f">{times[1]:.0f}<",
    ):
        assert part in svg
    draw(benchmark.report, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg


def test_picture_needs_a_decode_step_and_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.svg"
    runs = {dtype: AttentionRun(CPU, (dtype,), with_peers=False) for dtype in ("nvfp4", "fp8")}
    for benchmark in runs.values():
        benchmark.run(decode("llama", 1, 20))
    with monkeypatch.context() as context:
        context.setattr("benchmarks.svg.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install 'halfbyte\[bench\]'"):
            draw(runs["nvfp4"].report, picture)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no decode step on an nvfp4 cache"):
        draw(runs["fp8"].report, picture)
    assert not picture.exists()


@pytest.mark.gpu
def test_benchmark_on_a_gpu() -> None:
    benchmark = AttentionRun(torch.device("cuda"), ("nvfp4", "bfloat16"), with_peers=False)
    for case in (decode("llama", 4, 300), store("llama", 64), prefill("llama", 2, 40, 20)):
        row = benchmark.run(case)
        for name in ("halfbyte_nvfp4", "halfbyte_bf16"):
            assert "failed" not in row[name], row[name]
            assert row[name]["single"] > 0
    decoded = benchmark.report["microseconds"][0]["halfbyte_nvfp4"]
    assert decoded["backend"] == "cuda"
    assert decoded["graph"]
    assert decoded["error"] < 0.01
    assert decoded["workspace_bytes"] > 2 * 4 * 32 * 128, "the output alone"
    assert 0 < decoded["in_graph"] < 2 * decoded["single"]
    assert "in_graph" not in benchmark.report["microseconds"][2]["halfbyte_nvfp4"]


def test_a_window_has_only_pages_that_are_read() -> None:
    """Otherwise all copies together would fit in the GPU's L2."""
    case = replace(ragged("llama", 3, 200), sliding_window=20)
    cache = data.make_inputs(case, "nvfp4", CPU)
    lengths = case.lengths().tolist()
    firsts = [max(0, length - 20) // 16 for length in lengths]
    live = {
        int(page)
        for row, first, length in zip(cache.block_tables, firsts, lengths, strict=True)
        for page in row[first : -(-length // 16)]
    }
    assert live == set(range(len(cache.pools[0])))
    assert len(live) == sum(-(-n // 16) - f for n, f in zip(lengths, firsts, strict=True))
    assert cache.num_bytes == sum(min(n, 20) for n in lengths) * cache.layout.bytes_per_token
