"""`halfbyte bench`"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from halfbyte.cli.bench_arguments import (
    check_memory,
    choose_cases,
    linear_bytes,
    moe_bytes,
    numbers,
    parse_moe_shapes,
    parse_shapes,
)
from halfbyte.cli.bench_tables import failures, tables
from halfbyte.cli.console import err, out, progress_bar, quiet_libraries
from halfbyte.cli.options import AttentionBackend, Verbose, given_path

if TYPE_CHECKING:
    import torch

    from halfbyte.bench import LinearBenchmark, MoeBenchmark
    from halfbyte.measure.report import Report

_MIN_WIDTH = 90

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Tokens = Annotated[str | None, typer.Option("--m", help="Numbers of tokens, separated by commas.")]
Backends = Annotated[
    str | None,
    typer.Option(help="Backends, separated by commas; by default halfbyte's own that run here."),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        parser=given_path,
        metavar="PATH",
        help="Write the report there, as JSON, after every case.",
    ),
]

bench = typer.Typer(
    help="Compare the speed of halfbyte's kernels with PyTorch's on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("attention")
def attention(
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Formats of halfbyte's cache, separated by commas.")
    ] = "nvfp4",
    only: Annotated[
        str | None, typer.Option(help="Run only cases whose name matches this regular expression.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Run a grid instead of the default cases: numbers of sequences, separated by "
            "commas. By default 1 if only context or heads are given."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens per sequence of the grid; by default 8192.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads of the grid; by default llama; also gpt-oss, gemma, mistral, "
            "gpt-oss-sliding."
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure PyTorch's SDPA, too.")] = True,
    device: Device = "auto",
    attention_backend: AttentionBackend = None,
    as_json: AsJson = False,
    report: ReportFile = None,
    verbose: Verbose = False,
) -> None:
    """Decode, prefill and store: times, bandwidth and error, and times of PyTorch's SDPA."""
    from halfbyte.bench import AttentionBenchmark

    quiet_libraries(verbose=verbose)
    where = _device(device)
    cases = choose_cases(where.type, only, batch, context, heads)
    names = [name.strip() for name in kv_cache_dtype.split(",")]
    # A lower bound in bytes: K and V in 4 bits each, the smallest format.
    sizes = ((case.name, case.tokens_read * case.kv_heads * case.head_size) for case in cases)
    check_memory(where, "context, batch, heads", sizes)
    benchmark = AttentionBenchmark(where, names, with_peers=peers, backend=attention_backend)
    _check_writable(report)
    with progress_bar("bench", "cases") as on_progress:
        for done, case in enumerate(cases):
            on_progress(done, len(cases))
            benchmark.run(case)
            _write(benchmark.report, report)
    _end(benchmark.report, as_json=as_json)


@bench.command("linear")
def linear(
    shapes: Annotated[
        str | None, typer.Option(help="Weights N x K, such as 6144x4096,4096x14336.")
    ] = None,
    m: Tokens = None,
    backends: Backends = None,
    device: Device = "auto",
    as_json: AsJson = False,
    report: ReportFile = None,
    verbose: Verbose = False,
) -> None:
    """Products with NVFP4 weights: times and errors, and times with bfloat16 weights."""
    from halfbyte.bench import LinearBenchmark

    quiet_libraries(verbose=verbose)
    benchmark = LinearBenchmark(
        _device(device),
        parse_shapes(shapes) if shapes else (),
        *_tokens_and_backends(m, backends),
    )
    _run(benchmark, linear_bytes, report, as_json=as_json)


@bench.command("moe")
def moe(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="qwen3-30b-a3b, gpt-oss-20b, or experts x top-k x hidden x intermediate size such "
            "as 128x8x2048x768 (NVFP4); separated by commas."
        ),
    ] = None,
    m: Tokens = None,
    backends: Backends = None,
    device: Device = "auto",
    as_json: AsJson = False,
    report: ReportFile = None,
    verbose: Verbose = False,
) -> None:
    """MoE layers with 4-bit experts: times and errors, and times with bfloat16 experts."""
    from halfbyte.bench import MoeBenchmark

    quiet_libraries(verbose=verbose)
    benchmark = MoeBenchmark(
        _device(device),
        parse_moe_shapes(shapes) if shapes else (),
        *_tokens_and_backends(m, backends),
    )
    _run(benchmark, moe_bytes, report, as_json=as_json)


def _tokens_and_backends(m: str | None, backends: str | None) -> tuple[list[int], list[str]]:
    names = [name.strip() for name in backends.split(",")] if backends else []
    return numbers("m", m) if m else [], names


def _run(
    benchmark: "LinearBenchmark | MoeBenchmark",
    num_bytes: Callable[[Any, int], int],
    report: Path | None,
    *,
    as_json: bool,
) -> None:
    needed = ((f"{shape} with M={m}", num_bytes(shape, m)) for shape, m in benchmark.cases)
    check_memory(benchmark.device, "shapes, m", needed)
    _check_writable(report)
    with progress_bar("bench", "cases") as on_progress:
        on_progress(0, len(benchmark.cases))
        for done, _ in enumerate(benchmark.run(), start=1):
            on_progress(done, len(benchmark.cases))
            _write(benchmark.report, report)
    _end(benchmark.report, as_json=as_json)


def _device(name: str) -> "torch.device":
    import torch

    available = torch.cuda.is_available()
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device: expected auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not available:
        raise ValueError("device: PyTorch finds no GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _check_writable(file: Path | None) -> None:
    """Raise before measuring if the file cannot be written."""
    if file is None:
        return
    try:
        # Opening a pipe would wait for a reader.
        is_file = not (file.is_dir() or file.is_fifo())
        if is_file:
            file.touch()
    except OSError as error:
        raise ValueError(f"out: {error}") from None
    if not is_file:
        raise ValueError(f"out: {file}: expected the name of a regular file")


def _write(report: "Report", file: Path | None) -> None:
    try:
        if file is not None:
            file.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"out: {file}: cannot be written: {error.strerror}") from None


def _end(report: "Report", *, as_json: bool) -> None:
    """Print the report, then failures; exit with 1 if any of halfbyte's failed."""
    if as_json:
        print(json.dumps(report))
    else:
        wide = Console(highlight=False, soft_wrap=True, width=max(out.width, _MIN_WIDTH))
        for table in tables(report):
            wide.print(table)
            wide.print()
        machine = report["machine"]
        read, copied = (report[f"{x}_terabytes_per_s"] * 1e3 for x in ("read", "copy"))
        name = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
        out.print(f"{name}: reads {read:,.1f} GB/s, copies {copied:,.1f} GB/s")
    failed = failures(report)
    for (row, contender), why in failed.items():
        err.print(f"{row}: {contender}: {why}", markup=False, emoji=False, style="red")
    if any(not contender.startswith(("sdpa", "dense")) for _, contender in failed):
        raise typer.Exit(1)
