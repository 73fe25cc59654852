"""A checkpoint in, an NVFP4 checkpoint out: what `halfbyte quantize` runs."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.dialects.base import KV_CACHE_ALGOS, Dialect, OutputFormat
from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE
from halfbyte.checkpoints.dialects.registry import DIALECTS, get_dialect, read_config
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import INDEX_FILE, CheckpointIndex
from halfbyte.checkpoints.kv_scales import read_kv_scales
from halfbyte.checkpoints.output_folder import (
    DEFAULT_SHARD_BYTES,
    REPORT_FILE,
    ShardWriter,
    copy_file,
    new_folder,
    write_json,
)
from halfbyte.checkpoints.quantize import (
    CalibrationResult,
    LayerError,
    WeightPlan,
    quantize_tensors,
)
from halfbyte.layouts import KVCacheDType
from halfbyte.models.calibration import read_calibration_text, scales_from_amax
from halfbyte.models.config_fields import check_sizes
from halfbyte.models.loading import load_model, load_tokenizer, local_folder
from halfbyte.models.local_files import read_model_config
from halfbyte.models.weight_calibration import calibrate_weights
from halfbyte.models.weight_plan import plan_weights
from halfbyte.numerics import nvfp4

WEIGHT_FORMATS = {"nvfp4": True, "nvfp4-a16": False}
"""Names, and whether activations are quantized, too."""
_WEIGHT_FILES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
}
_REPLACED = {"config.json", INDEX_FILE, MODELOPT_FILE, REPORT_FILE}

OnProgress = Callable[[str, int, int], Any]
"""Takes what is going on ("calibrating", "quantizing"), how far it is, and how far it goes."""


@dataclass(frozen=True)
class QuantizationReport:
    """What was written, and what it cost.

    Args:
        format, weights, recipe, kv_cache_dtype: as asked for.
        calibration: the text that was run, or None.
        layers: the error of each quantized layer.
        mean_sqnr_db, min_sqnr_db: over the layers whose error is not zero; None if there are none.
        ignored: linear layers that stay as they were.
        source_bytes, bytes: of the safetensors files before and after.
    """

    format: Dialect
    weights: str
    recipe: nvfp4.Recipe
    kv_cache_dtype: str | None
    calibration: str | None
    layers: tuple[LayerError, ...]
    mean_sqnr_db: float | None
    min_sqnr_db: float | None
    ignored: tuple[str, ...]
    source_bytes: int
    bytes: int


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: str,
    weights: str = "nvfp4",
    recipe: str = "amax6",
    kv_cache_dtype: str | None = None,
    calibration_file: str | Path | None = None,
    ignore: Sequence[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> QuantizationReport:
    """Quantize the linear layers of a checkpoint's decoder layers to NVFP4.

    Args:
        source: folder or hub id of an unquantized checkpoint with safetensors.
        destination: folder to write; it appears when all of it is there.
        dialect: `modelopt` or `compressed-tensors`.
        weights: `nvfp4` (W4A4: the activations' scales are calibrated) or `nvfp4-a16` (W4A16).
        recipe: `amax6` or `four_over_six`, for the weights' block scales.
        kv_cache_dtype: `nvfp4` or `fp8` to calibrate K and V and to declare the cache's format.
        calibration_file: UTF-8 text to calibrate on; by default the built-in text.
        ignore: more layers to leave as they are, see `plan_weights`.
        max_shard_bytes: size of a file of weights.
        replace: replace `destination` if it exists.
        on_progress: see `OnProgress`.

    Raises:
        ModelLoadError, UnsupportedModelError: the source is no checkpoint of a supported model.
        CheckpointError: it is quantized already, has no safetensors or broken ones, or lacks a
            weight of the model; the destination exists, lies inside the source, or cannot be
            written.
        ValueError: an unknown name, a pattern that matches nothing, or a text that is empty.
    """
    output = _output_format(dialect, weights, recipe, kv_cache_dtype)
    if calibration_file is not None and not output.needs_calibration:
        raise ValueError(
            f"calibrate: weights {weights!r} without a quantized KV cache need no calibration"
        )
    text = read_calibration_text(calibration_file, "calibrate")
    folder = local_folder(source)
    _check_destination(folder, Path(destination))
    config = _read_config(folder)
    index = CheckpointIndex.read(folder)
    model_config = read_model_config(folder)
    check_sizes(model_config, index)
    plan = plan_weights(model_config, index, ignore)
    other_files = _other_files(folder)
    if not output.kv_cache_dtype:
        read_kv_scales(folder)  # are copied, and broken ones could not be loaded
    with new_folder(destination, replace=replace) as target:
        calibration = CalibrationResult()
        if output.needs_calibration:
            calibration = _calibrate(folder, plan, text, calibration_file, on_progress)
            if output.kv_cache_dtype:
                scales = scales_from_amax(calibration.kv_amax, calibration.source or "", 1.0)
                kv_amax = tuple(zip(scales.k_amax, scales.v_amax, strict=True))
                calibration = dataclasses.replace(calibration, kv_amax=kv_amax)
        writer = ShardWriter(target, max_shard_bytes)
        layers = quantize_tensors(
            index,
            writer,
            plan,
            output,
            calibration,
            lambda done, total: on_progress("quantizing", done, total),
        )
        writer.finish()
        report = _report(output, weights, plan, calibration, layers, index, target)
        _write_other_files(other_files, target, config, output, plan.ignore, report)
    return report


def _output_format(
    dialect: str, weights: str, recipe: str, kv_cache_dtype: str | None
) -> OutputFormat:
    _check_name("format", dialect, DIALECTS)
    _check_name("weights", weights, tuple(WEIGHT_FORMATS))
    _check_name("recipe", recipe, nvfp4.RECIPES)
    if kv_cache_dtype is not None:
        _check_name("kv_cache_dtype", kv_cache_dtype, (*KV_CACHE_ALGOS, "fp8"))
        kv_cache_dtype = KVCacheDType.parse(kv_cache_dtype).value
    return OutputFormat(
        dialect,  # type: ignore[arg-type]
        WEIGHT_FORMATS[weights],
        recipe,  # type: ignore[arg-type]
        kv_cache_dtype,
    )


def _check_name(argument: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{argument}: expected one of {', '.join(valid)}, got {value!r}")


def _check_destination(folder: Path, destination: Path) -> None:
    source, target = folder.resolve(), destination.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(
            f"{destination}: expected a folder apart from the source, found one inside the other"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json, of a checkpoint that is not quantized."""
    config = read_config(folder)
    section = config.get("quantization_config") or config.get("compression_config")
    if section or (folder / MODELOPT_FILE).is_file():
        method = section.get("quant_method") if isinstance(section, dict) else None
        raise CheckpointError(
            f"{folder}: expected an unquantized checkpoint, found one quantized by "
            f"{method or 'modelopt'}"
        )
    return config


def _calibrate(
    folder: Path,
    plan: WeightPlan,
    text: str,
    file: str | Path | None,
    on_progress: OnProgress,
) -> CalibrationResult:
    tokenizer = load_tokenizer(folder)
    token_ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    name = "the built-in text" if file is None else Path(file).name
    model = load_model(folder)
    return calibrate_weights(
        model,
        token_ids,
        plan.modules,
        f"{token_ids.shape[1]} tokens of {name}",
        lambda done, total: on_progress("calibrating", done, total),
    )


def _report(
    output: OutputFormat,
    weights: str,
    plan: WeightPlan,
    calibration: CalibrationResult,
    layers: Sequence[LayerError],
    index: CheckpointIndex,
    target: Path,
) -> QuantizationReport:
    noisy = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    return QuantizationReport(
        format=output.dialect,
        weights=weights,
        recipe=output.recipe,
        kv_cache_dtype=output.kv_cache_dtype,
        calibration=calibration.source,
        layers=tuple(layers),
        mean_sqnr_db=sum(noisy) / len(noisy) if noisy else None,
        min_sqnr_db=min(noisy, default=None),
        ignored=plan.ignore,
        source_bytes=_size({entry.file for entry in index.tensors.values()}),
        bytes=_size(target.glob("*.safetensors")),
    )


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _other_files(folder: Path) -> list[Path]:
    """All that is not weights and does not declare a quantization."""
    files = []
    for file in sorted(folder.iterdir()):
        hidden = file.name.startswith(".")
        if hidden or file.is_dir() or file.suffix in _WEIGHT_FILES or file.name in _REPLACED:
            continue
        if not file.is_file():
            found = "something else" if file.exists() else "a link to nothing"
            raise CheckpointError(f"{file}: expected a file, found {found}")
        files.append(file)
    return files


def _write_other_files(
    other_files: Sequence[Path],
    target: Path,
    config: dict[str, Any],
    output: OutputFormat,
    ignore: Sequence[str],
    report: QuantizationReport,
) -> None:
    """All that is not weights: as in the source, but for what declares the quantization."""
    for file in other_files:
        copy_file(file, target / file.name)
    write_json(target / REPORT_FILE, asdict(report))
    dialect = get_dialect(output.dialect)
    for name, fields in dialect.own_files(output, ignore).items():
        write_json(target / name, fields)
    section = dialect.config_section(output, ignore)
    write_json(target / "config.json", {**config, "quantization_config": section})
