"""`halfbyte bench`"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfbyte.cli.bench_tables import failures, tables
from halfbyte.cli.console import err, out, progress_bar, quiet_libraries
from halfbyte.cli.options import AttentionBackend, Verbose

if TYPE_CHECKING:
    import torch

    from halfbyte.bench import Case, LinearBenchmark, MoeBenchmark, MoeShape
    from halfbyte.bench.report import Report

_MIN_WIDTH = 90

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Tokens = Annotated[str | None, typer.Option("--m", help="Numbers of tokens, separated by commas.")]
Backends = Annotated[
    str | None,
    typer.Option(help="Backends, separated by commas; by default halfbyte's own that run here."),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
ReportFile = Annotated[
    Path | None, typer.Option("--out", help="Write the report there, as JSON, after every case.")
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
    _run(benchmark, report, as_json=as_json)


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
    _run(benchmark, report, as_json=as_json)


def _tokens_and_backends(m: str | None, backends: str | None) -> tuple[list[int], list[str]]:
    names = [name.strip() for name in backends.split(",")] if backends else []
    return _numbers("m", m) if m else [], names


def _run(
    benchmark: "LinearBenchmark | MoeBenchmark", report: Path | None, *, as_json: bool
) -> None:
    _check_writable(report)
    with progress_bar("bench", "cases") as on_progress:
        on_progress(0, len(benchmark.cases))
        for done, _ in enumerate(benchmark.run(), start=1):
            on_progress(done, len(benchmark.cases))
            _write(benchmark.report, report)
    _end(benchmark.report, as_json=as_json)


def parse_moe_shapes(text: str) -> "list[MoeShape]":
    """Shapes by name or sizes; ValueError for something else."""
    from halfbyte.bench import MOE_SHAPES, MoeShape

    result = []
    for part in map(str.strip, text.split(",")):
        sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", part.lower())
        if sizes is None and part not in MOE_SHAPES:
            raise ValueError(
                f"shapes: expected {', '.join(MOE_SHAPES)}, or experts x top-k x hidden x "
                f"intermediate size such as 128x8x2048x768, got {part!r}"
            )
        if sizes is None:
            shape = MOE_SHAPES[part]
        else:
            num_experts, top_k, hidden, intermediate = map(int, sizes.groups())
            shape = MoeShape(num_experts, top_k, hidden, intermediate)
        if not 1 <= shape.top_k <= shape.num_experts:
            raise ValueError(f"shapes: expected top-k of 1 .. experts, got {part!r}")
        result.append(shape)
    return result


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """N and K of `6144x4096,4096x14336`; ValueError for something else."""
    parts = [re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", part) for part in text.split(",")]
    shapes = [(int(part[1]), int(part[2])) for part in parts if part]
    if len(shapes) != len(parts):
        raise ValueError(f"shapes: expected N x K such as 6144x4096,4096x14336, got {text!r}")
    return shapes


def _device(name: str) -> "torch.device":
    import torch

    available = torch.cuda.is_available()
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device: expected auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not available:
        raise ValueError("device: PyTorch finds no GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def choose_cases(
    device_type: str, only: str | None, batch: str | None, context: str | None, heads: str | None
) -> "list[Case]":
    """The default cases or a grid, filtered by the regular expression `only`.

    Raises:
        ValueError: bad numbers, an unknown preset, not a regular expression, or no case is left.
    """
    from halfbyte.bench import CPU_CASES, GPU_CASES

    cases = list(GPU_CASES if device_type == "cuda" else CPU_CASES)
    if batch or context or heads:
        presets = [name.strip() for name in (heads or "llama").split(",")]
        cases = grid(
            presets, _numbers("batch", batch or "1"), _numbers("context", context or "8192")
        )
    try:
        chosen = [case for case in cases if re.search(only or "", case.name)]
    except re.error as error:
        raise ValueError(f"only: {only!r} is not a regular expression: {error}") from None
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ValueError(f"only: {only!r} matches none of {names}")
    return chosen


def grid(presets: list[str], batches: list[int], contexts: list[int]) -> "list[Case]":
    """Decode, prefill of whole prompts, and store, for every combination; ValueError for a preset
    that does not exist."""
    from halfbyte.bench.cases import PRESETS, decode, prefill, store

    if unknown := [name for name in presets if name not in PRESETS]:
        raise ValueError(f"heads: unknown {unknown[0]!r}; expected one of {', '.join(PRESETS)}")
    points = [(p, b, c) for p in presets for b in batches for c in contexts]
    cases = [
        *(decode(*point) for point in points),
        *(prefill(*point) for point in points),
        *(store(preset, batch * context) for preset, batch, context in points),
    ]
    return list(dict.fromkeys(cases))


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise ValueError(f"{name}: expected at least 1, got {min(numbers)}")
    return numbers


def _check_writable(file: Path | None) -> None:
    """Raise before measuring if the file cannot be written."""
    try:
        if file is not None:
            file.touch()
    except OSError as error:
        raise ValueError(f"out: {error}") from None


def _write(report: "Report", file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")


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
