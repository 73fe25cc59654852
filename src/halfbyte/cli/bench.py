"""`halfbyte bench`"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfbyte.cli.console import err, out, progress_bar, quiet_libraries
from halfbyte.cli.options import AttentionBackend, Verbose

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from rich.table import Table

    from halfbyte.bench import Case, Report

_TABLE_WIDTH = 100
_WIDE_TABLE_WIDTH = 130

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
ReportFile = Annotated[
    Path | None, typer.Option("--out", help="Write the report there, as JSON, after every case.")
]

bench = typer.Typer(
    help="Measure halfbyte beside its peers on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("attention")
def attention(
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Formats of halfbyte's cache, separated by commas.")
    ] = "nvfp4",
    only: Annotated[
        str | None, typer.Option(help="Cases whose name this regular expression is found in.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Sequences, separated by commas: a grid of your own instead of the usual cases. "
            "Where only context or heads are given, 1."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens per sequence of that grid, otherwise 8192.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads of that grid, otherwise llama: gpt-oss, gemma, mistral, gpt-oss-sliding, "
            "wide, long-pages, mqa, speculative."
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure FlashInfer and SDPA, too.")] = True,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    attention_backend: AttentionBackend = None,
    as_json: AsJson = False,
    report: ReportFile = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the decode steps as SVG (needs matplotlib).")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Store, decode and prefill: times, bandwidth, error, and what peers take for the same."""
    from halfbyte.bench import Benchmark, console_tables
    from halfbyte.bench.picture import check_drawable, draw

    quiet_libraries(verbose=verbose)
    where = _device(device)
    cases = _cases(where.type, only, batch, context, heads)
    names = [name.strip() for name in kv_cache_dtype.split(",")]
    benchmark = Benchmark(where, names, with_peers=peers, backend=attention_backend)
    if picture is not None:
        check_drawable(names, cases)
    _check_writable(out=report, picture=picture)
    with progress_bar("bench", "cases") as on_progress:
        for done, case in enumerate(cases):
            on_progress(done, len(cases))
            benchmark.run(case)
            if report is not None:  # an interrupt loses one at most
                report.write_text(json.dumps(benchmark.report, indent=2) + "\n")
    if as_json:
        print(json.dumps(benchmark.report))
    else:
        _print(console_tables(benchmark.report), _TABLE_WIDTH, benchmark.report)
    if picture is not None:
        draw(benchmark.report, picture)
    _end(benchmark.failures(), benchmark.failures(ours=True))


@bench.command("linear")
def linear(
    shapes: Annotated[
        str | None, typer.Option(help="Weights N x K, such as 6144x4096,4096x14336.")
    ] = None,
    m: Annotated[
        str | None, typer.Option("--m", help="Numbers of rows of x, separated by commas.")
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(help="Backends, separated by commas; by default all that can run."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    as_json: AsJson = False,
    report: ReportFile = None,
    warm_up: Annotated[
        bool,
        typer.Option("--warm-up", help="Compile what backends keep on disk; measure nothing."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """x times NVFP4 weights: times of every backend, and what bf16 weights take for the same."""
    from halfbyte.bench import LinearBenchmark, linear_tables, parse_shapes, to_json

    where = _device(device)
    benchmark = LinearBenchmark(
        where,
        parse_shapes(shapes) if shapes else None,
        _numbers("m", m) if m else None,
        [name.strip() for name in backends.split(",")] if backends else None,
    )
    if warm_up:
        benchmark.warm_up()
        return
    quiet_libraries(verbose=verbose)
    _check_writable(out=report)
    with progress_bar("bench", "cases") as on_progress:
        on_progress(0, len(benchmark.cases))
        for done, _ in enumerate(benchmark.run(), start=1):
            on_progress(done, len(benchmark.cases))
            if report is not None:  # an interrupt loses one at most
                report.write_text(to_json(benchmark.report))
    if as_json:
        print(json.dumps(benchmark.report))
    else:
        _print(linear_tables(benchmark.report), _WIDE_TABLE_WIDTH, benchmark.report)
    _end(benchmark.failures(), benchmark.failures(ours=True))


def _device(name: str) -> "torch.device":
    import torch

    available = torch.cuda.is_available()
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device: expected auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not available:
        raise ValueError("device: PyTorch finds no GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _cases(
    device_type: str, only: str | None, batch: str | None, context: str | None, heads: str | None
) -> "list[Case]":
    from halfbyte.bench import CPU_CASES, GPU_CASES, grid, select

    if batch or context or heads:
        presets = [name.strip() for name in (heads or "llama").split(",")]
        cases = grid(
            presets, _numbers("batch", batch or "1"), _numbers("context", context or "8192")
        )
    else:
        cases = list(GPU_CASES if device_type == "cuda" else CPU_CASES)
    return select(cases, only)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}") from None


def _check_writable(**files: Path | None) -> None:
    """What cannot be written is better known now than after minutes."""
    for option, file in files.items():
        try:
            if file is not None:
                file.touch()
        except OSError as error:
            raise ValueError(f"{option}: {error}") from None


def _print(tables: "Iterable[Table]", width: int, report: "Report") -> None:
    wide = Console(highlight=False, soft_wrap=True, width=max(out.width, width))
    for table in tables:
        wide.print(table)
        wide.print()
    machine, read = report["machine"], report["read_terabytes_per_s"] * 1e3
    name = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
    out.print(
        f"{name}: reads {read:,.1f} GB/s, copies {report['copy_terabytes_per_s'] * 1e3:,.1f} GB/s"
    )


def _end(failures: list[str], ours: list[str]) -> None:
    """Print what failed; exit with 1 if any of it is ours."""
    for line in failures:
        err.print(line, markup=False, emoji=False, style="red")
    if ours:
        raise typer.Exit(1)
