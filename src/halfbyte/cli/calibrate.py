"""`halfbyte calibrate`"""

import json
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from halfbyte.cli.console import out, progress_bar, quiet_libraries
from halfbyte.cli.options import DType, Verbose, checkpoint, given_path

if TYPE_CHECKING:
    from halfbyte.kvcache import KVScales


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Folder or hub id of a checkpoint.", callback=checkpoint)
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="PATH",
            help="UTF-8 text to calibrate on; by default a built-in one.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=given_path,
            metavar="PATH",
            help="File to write; by default kv_scales.json in the model's folder, or a file in the "
            "cache folder for hub ids and folders that cannot be written.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Max tokens of the text; by default the model's context length, up to 2,048."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 …; by default a GPU if there is one.")
    ] = None,
    dtype: DType = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    download_dir: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, metavar="PATH", help="Folder for files of a hub id, as in vLLM."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure even if the folder's scales take precedence.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure the scales of a model's KV cache, one layer in memory at a time, and store them."""
    from halfbyte.models.local_files import local_folder, read_model_config

    quiet_libraries(verbose=verbose)
    folder = local_folder(model, revision=revision, cache_dir=download_dir)
    read_model_config(folder)  # report an unsupported model first
    path, is_kept = (file, False) if file is not None else destination(model, folder)
    shadow = _comes_first(folder, is_kept=is_kept)
    if shadow and not force:
        note = f"{model}: nothing to do: {shadow} (--force measures anyway)"
        if as_json:
            print(json.dumps({"path": None, "note": note}))
        else:
            out.print(note, markup=False)
        return
    measuring = {"text_file": text, "max_tokens": max_tokens, "device": device, "dtype": dtype}
    scales = measure(folder, path, is_kept=is_kept, **measuring)
    if as_json:
        fields = {"source": scales.source, "k_amax": scales.k_amax, "v_amax": scales.v_amax}
        print(json.dumps({"path": str(path), "layers": scales.num_layers, **fields}))
        return
    out.print(_table(scales))
    out.print(scales.source, markup=False)
    out.print(f"{path}: written", markup=False)
    if shadow:
        out.print(f"used only if passed as kv_scales, because {shadow}", markup=False)


def destination(model: str, folder: Path) -> tuple[Path, bool]:
    """Where to write a model's scales, and whether that is in the cache folder.

    Args:
        model: as the user named it: a folder or a hub id.
        folder: its folder.

    Raises:
        ValueError: the folder cannot be written, and there is no cache folder.
    """
    from halfbyte.kvcache import KV_SCALES_FILE
    from halfbyte.models.choose_kv_scales import cached_calibration

    if Path(model).is_dir() and os.access(folder, os.W_OK):
        return folder / KV_SCALES_FILE, False
    kept = cached_calibration(folder)
    if kept is None:
        raise ValueError(
            f"{model}: cannot be written, and there is no cache folder (HALFBYTE_CACHE_DIR is "
            "empty): say where to write with `halfbyte calibrate --out`"
        )
    return kept, True


def measure(folder: Path, path: Path, *, is_kept: bool, **measuring: Any) -> "KVScales":
    """Measure the scales of the model in a folder and write them, with a progress bar.

    Args:
        folder: of the model.
        path: file to write.
        is_kept: see `destination`.
        measuring: arguments of `calibrate_checkpoint`.

    Raises:
        ValueError, OSError: the file cannot be written (checked first); or as
            `calibrate_checkpoint`.
    """
    from halfbyte.models.layerwise import calibrate_checkpoint

    _check_writable(path, is_kept=is_kept)
    with progress_bar("calibrating", "layers") as update:
        scales = calibrate_checkpoint(folder, on_layer=update, **measuring)
    scales.save_file(path)
    return scales


def _comes_first(folder: Path, *, is_kept: bool) -> str | None:
    """The scales in the folder that take precedence over the written file; None if none do."""
    from halfbyte.kvcache import KV_SCALES_FILE, KVScales
    from halfbyte.kvcache.recipe import DEFAULT, RECIPES

    # Other scales, such as the checkpoint's own, take precedence only for the recipe `plain`.
    scales = KVScales.load(folder) if is_kept else None
    if scales is not None and scales.suits(RECIPES[DEFAULT]):
        return f"its folder has a {KV_SCALES_FILE} with a calibration, which takes precedence"
    return None


def _check_writable(path: Path, *, is_kept: bool) -> None:
    """Raise ValueError or OSError before calibrating if the file cannot be written."""
    from halfbyte.files import make_private
    from halfbyte.kvcache.calibration_file import check_sibling

    if is_kept:
        make_private(path.parent)
    if path.is_dir():
        raise ValueError(f"out: {path}: is a folder, expected the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"out: {path}: expected the name of a regular file")
    if not path.parent.is_dir():
        raise ValueError(f"out: {path.parent}: no such folder")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"out: {path.parent}: cannot be written")
    check_sibling(path)


def _table(scales: "KVScales") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("amax", "layers", "min", "median", "max"):
        table.add_column(column, justify="left" if column == "amax" else "right")
    for side, amax in (("K", scales.k_amax), ("V", scales.v_amax)):
        values = (f"{value:.4g}" for value in (min(amax), median(amax), max(amax)))
        table.add_row(side, str(scales.num_layers), *values)
    return table
