"""`halfbyte quantize`"""

import json
import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from halfbyte.cli.console import out, progress_bar, quiet_libraries
from halfbyte.cli.options import Verbose, checkpoint, given_path

if TYPE_CHECKING:
    from halfbyte.quantization import QuantizationReport
    from halfbyte.quantization.pipeline import OnProgress

_UNITS = {
    "calibrating": "tokens",
    "rounding": "layers",
    "quantizing": "tensors",
    "measuring": "layers",
    "copying": "tensors",
}
_GIGABYTE = 1e9


def quantize(
    source: Annotated[
        str,
        typer.Argument(help="Folder or hub id of the checkpoint to quantize.", callback=checkpoint),
    ],
    destination: Annotated[
        Path, typer.Argument(parser=given_path, metavar="PATH", help="Folder to write.")
    ],
    dialect: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Dialect to write: modelopt or compressed-tensors. None for GPT-OSS's own files, "
            "whose experts stay in MXFP4.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="nvfp4 (W4A4, calibrated; the default) or nvfp4-a16 (W4A16, weights only)."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="How block scales are chosen: amax6 or four_over_six.")
    ] = "amax6",
    method: Annotated[
        str,
        typer.Option(
            help="How weights are rounded: rtn (to nearest) or gptq (slower; minimizes the error "
            "of a layer's output on the calibration text)."
        ),
    ] = "rtn",
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="nvfp4 or fp8: calibrate K and V, declare the format."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="PATH",
            help="UTF-8 text to calibrate on; by default a built-in one.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers not to quantize: a name, a wildcard, or re: and a regular expression; "
            "repeatable."
        ),
    ] = None,
    shard_size: Annotated[
        float, typer.Option(help="Max gigabytes per file of weights; memory use is about this.")
    ] = 5.0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the destination if it is a checkpoint.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a checkpoint's linear layers to NVFP4, and its KV cache, for halfbyte and others."""
    from halfbyte.checkpoints.output_folder import REPORT_FILE
    from halfbyte.quantization import quantize_checkpoint

    quiet_libraries(verbose=verbose)
    if not 0 < shard_size < math.inf:
        raise ValueError(f"shard_size: expected a positive, finite number, got {shard_size}")
    with ExitStack() as bars:
        report = quantize_checkpoint(
            source,
            destination,
            dialect=dialect,
            weights=weights,
            recipe=recipe,
            method=method,
            kv_cache_dtype=kv_cache_dtype,
            calibration_file=calibrate,
            ignore=ignore or (),
            max_shard_bytes=max(1, int(shard_size * _GIGABYTE)),
            replace=force,
            on_progress=_progress(bars),
        )
    if as_json:
        print(json.dumps({"destination": str(destination), **asdict(report)}))
        return
    if report.layers:
        out.print(_table(report))
    out.print(_summary(report))
    out.print(f"{destination}: written, with {REPORT_FILE}", markup=False)


def _progress(bars: ExitStack) -> "OnProgress":
    """One progress bar per phase."""
    shown: dict[str, object] = {}

    def update(what: str, done: int, total: int) -> None:
        if what not in shown:
            bars.close()
            shown[what] = bars.enter_context(progress_bar(what, _UNITS[what]))
        shown[what](done, total)  # type: ignore[operator]

    return update


def _table(report: "QuantizationReport") -> Table:
    """SQNR in dB: a row for each decoder layer, a column for each projection (experts: mean)."""
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for layer in report.layers:
        _, _, rest = layer.module.partition("layers.")
        row, _, path = rest.partition(".")
        values = cells[row][path.rpartition(".")[2]]
        if layer.sqnr_db is not None:
            values.append(layer.sqnr_db)
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    for column in columns:
        table.add_column(column, justify="right")
    for row in sorted(cells, key=int):
        table.add_row(row, *(_mean(cells[row].get(column)) for column in columns))
    return table


def _mean(values: list[float] | None) -> str:
    if values is None:
        return ""
    return f"{sum(values) / len(values):.2f}" if values else "exact"


def _summary(report: "QuantizationReport") -> str:
    mean, lowest = (
        "exact" if value is None else f"{value:.2f} dB"
        for value in (report.mean_sqnr_db, report.min_sqnr_db)
    )
    sizes = f"{_size(report.source_bytes)} -> {_size(report.bytes)}"
    if report.layers:
        lines = [
            f"signal to quantization noise: mean {mean}, least {lowest}",
            f"{len(report.layers)} layers in {report.weights} ({report.recipe}), "
            f"{len(report.ignored)} left as they were; {sizes}",
        ]
    else:
        lines = [
            f"experts copied in {report.weights}, bit for bit; {len(report.ignored)} linear layers "
            f"left as they were; {sizes}"
        ]
    if report.calibration:
        lines.append(f"calibrated on {report.calibration}")
    if report.kv_cache_dtype:
        lines.append(f"KV cache: {report.kv_cache_dtype}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIGABYTE:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
