"""Quantizes a checkpoint to NVFP4 (`halfbyte quantize`).

Steps: `select_layers`, `calibrate_layers`, `gptq` (if asked for), `write_layers`. The source and
the arguments are checked before anything runs or is written. Of GPT-OSS's own files, whose experts
are in MXFP4, only the cache is quantized (`keep_mxfp4`).
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.dialects.base import KV_CACHE_ALGOS, OutputFormat
from halfbyte.checkpoints.dialects.registry import DIALECTS, get_dialect
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.output_folder import (
    DEFAULT_SHARD_BYTES,
    REPORT_FILE,
    ShardWriter,
    copy_file,
    new_folder,
    write_json,
)
from halfbyte.checkpoints.stored_kv_scales import read_kv_scales
from halfbyte.layouts import KVCacheDType
from halfbyte.models.config_fields import check_sizes
from halfbyte.models.file_names import named_as_modules
from halfbyte.models.kv_calibration import (
    calibration_tokens,
    check_vocabulary,
    read_calibration_text,
    scales_from_amax,
)
from halfbyte.models.loader import load_model
from halfbyte.models.local_files import local_folder, read_model_config
from halfbyte.models.tokenizer import load_tokenizer
from halfbyte.numerics import nvfp4
from halfbyte.quantization.calibrate_layers import CalibrationResult, calibrate_layers
from halfbyte.quantization.gptq import check_linear, round_layers
from halfbyte.quantization.keep_mxfp4 import check_source, keep_mxfp4
from halfbyte.quantization.report import OnProgress, QuantizationReport
from halfbyte.quantization.select_layers import LayerSelection, select_layers
from halfbyte.quantization.source_folder import (
    check_destination,
    files_to_copy,
    read_unquantized_config,
)
from halfbyte.quantization.write_layers import RoundedLayer, check_finite, write_layers

METHODS = ("rtn", "gptq")
"""Rounding of weights: to nearest, or with error feedback, see `gptq`."""
WEIGHT_FORMATS = {"nvfp4": True, "nvfp4-a16": False}
"""Names, and whether activations are quantized."""


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: str | None = None,
    weights: str | None = None,
    recipe: str = "amax6",
    method: str = "rtn",
    kv_cache_dtype: str | None = None,
    calibration_file: str | Path | None = None,
    ignore: Sequence[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> QuantizationReport:
    """Quantize the linear layers of a checkpoint's decoder layers to NVFP4, and the KV cache.

    Args:
        source: folder or hub id of an unquantized checkpoint with safetensors, or of GPT-OSS's own.
        destination: folder to write; created atomically.
        dialect: `modelopt` or `compressed-tensors`; None for GPT-OSS's own files, whose tensors are
            copied: experts stay in MXFP4, other layers unquantized.
        weights: `nvfp4` (W4A4: the activations' scales are calibrated; the default) or `nvfp4-a16`
            (W4A16).
        recipe: `amax6` or `four_over_six`, for the weights' block scales.
        method: `rtn` (round weights to nearest) or `gptq` (minimize the error of a layer's output
            on the calibration text).
        kv_cache_dtype: `nvfp4` or `fp8` to calibrate K and V and to declare the cache's format;
            must be given if `dialect` is None.
        calibration_file: UTF-8 calibration text; by default the built-in text.
        ignore: further layers not to quantize, see `select_layers`.
        max_shard_bytes: max bytes per file of weights.
        replace: replace `destination` if it exists.
        on_progress: see `OnProgress`.

    Raises:
        ModelLoadError, UnsupportedModelError: the source is no checkpoint of a supported model.
        CheckpointError: the source is quantized already, has no safetensors or broken ones, or
            lacks a weight of the model; the destination exists, is inside the source, or cannot be
            written.
        ValueError: an unknown name, a pattern without a match, or an empty text; without `dialect`,
            a source that is not GPT-OSS's own, or an argument for weights.
    """
    if dialect is None:
        folder = local_folder(source)
        check_destination(folder, Path(destination))
        check_source(folder)
        _check_nothing_rounded(weights, recipe, method, ignore)
        cache = _cache_format(kv_cache_dtype)
        text, name_of_text = _calibration_text(calibration_file)
        return keep_mxfp4(
            folder, destination, cache, text, name_of_text, max_shard_bytes, replace, on_progress
        )
    weights = weights or "nvfp4"
    output = _output_format(dialect, weights, recipe, kv_cache_dtype)
    _check_name("method", method, METHODS)
    if calibration_file is not None and not (output.needs_calibration or method == "gptq"):
        raise ValueError(
            f"calibrate: weights {weights!r} by method {method} need no calibration without a "
            "quantized KV cache"
        )
    text, name_of_text = _calibration_text(calibration_file)
    folder = local_folder(source)
    check_destination(folder, Path(destination))
    checked = _read_source(folder, ignore)
    if method == "gptq":
        check_linear(checked.selection)
    if not output.kv_cache_dtype:
        read_kv_scales(folder)  # they are copied: raise for broken ones
    with new_folder(destination, replace=replace) as target:
        calibration = CalibrationResult()
        if output.needs_calibration:
            calibration = _calibrate(checked, text, name_of_text, output, on_progress)
        rounded: dict[str, RoundedLayer] = {}
        if method == "gptq":
            rounded, num_tokens = _round(checked, text, output, on_progress)
            if calibration.source is None:
                source_of_ids = f"{num_tokens} tokens of {name_of_text}"
                calibration = dataclasses.replace(calibration, source=source_of_ids)
        index, selection = checked.index, checked.selection
        writer = ShardWriter(target, max_shard_bytes, index.stored_module)
        on_layer = partial(on_progress, "quantizing")
        layers = write_layers(index, writer, selection, output, calibration, on_layer, rounded)
        writer.finish()
        report = QuantizationReport.of(
            output, weights, method, selection, calibration, layers, index, target
        )
        for file in checked.other_files:
            copy_file(file, target / file.name)
        write_json(target / REPORT_FILE, asdict(report))
        _write_declaration(target, checked, output)
    return report


@dataclass(frozen=True)
class _Source:
    """A checkpoint whose declaration and headers were checked."""

    folder: Path
    config: dict[str, Any]
    """As in config.json."""
    model_config: Any
    """transformers'."""
    index: CheckpointIndex
    selection: LayerSelection
    other_files: list[Path]


def _read_source(folder: Path, ignore: Sequence[str]) -> _Source:
    config = read_unquantized_config(folder)
    model_config = read_model_config(folder)
    index = named_as_modules(CheckpointIndex.read(folder), model_config.model_type)
    check_sizes(model_config, index)
    selection = select_layers(model_config, index, ignore)
    return _Source(folder, config, model_config, index, selection, files_to_copy(folder))


def _output_format(
    dialect: str, weights: str, recipe: str, kv_cache_dtype: str | None
) -> OutputFormat:
    _check_name("format", dialect, DIALECTS)
    _check_name("weights", weights, tuple(WEIGHT_FORMATS))
    _check_name("recipe", recipe, nvfp4.RECIPES)
    return OutputFormat(
        dialect,  # type: ignore[arg-type]
        WEIGHT_FORMATS[weights],
        recipe,  # type: ignore[arg-type]
        _cache_format(kv_cache_dtype),
    )


def _calibration_text(file: str | Path | None) -> tuple[str, str]:
    """The text, and its name in the report."""
    text = read_calibration_text(file, "calibrate")
    return text, "the built-in text" if file is None else Path(file).name


def _cache_format(kv_cache_dtype: str | None) -> str | None:
    """A key of `KV_CACHE_ALGOS`."""
    if kv_cache_dtype is None:
        return None
    _check_name("kv_cache_dtype", kv_cache_dtype, (*KV_CACHE_ALGOS, "fp8"))
    return KVCacheDType.parse(kv_cache_dtype).value


def _check_nothing_rounded(
    weights: str | None, recipe: str, method: str, ignore: Sequence[str]
) -> None:
    """Raise ValueError if an argument for weights is given although no weights are quantized."""
    for name, value, default in (
        ("weights", weights, None),
        ("recipe", recipe, "amax6"),
        ("method", method, "rtn"),
        ("ignore", list(ignore), []),
    ):
        if value != default:
            raise ValueError(
                f"{name}: got {value!r}, but without a format (modelopt or compressed-tensors) no "
                "weights are quantized"
            )


def _check_name(argument: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{argument}: expected one of {', '.join(valid)}, got {value!r}")


def _calibrate(
    source: _Source, text: str, name_of_text: str, output: OutputFormat, on_progress: OnProgress
) -> CalibrationResult:
    tokenizer = load_tokenizer(source.folder)
    token_ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    try:
        calibration = calibrate_layers(
            load_model(source.folder),
            token_ids,
            source.selection.modules,
            f"{token_ids.shape[1]} tokens of {name_of_text}",
            partial(on_progress, "calibrating"),
        )
    except ValueError:
        # A weight that is not finite shows in the inputs of layers behind it.
        check_finite(source.index, source.selection.modules)
        raise
    return _with_valid_kv_amax(calibration) if output.kv_cache_dtype else calibration


def _with_valid_kv_amax(calibration: CalibrationResult) -> CalibrationResult:
    """With a value for layers that were all zero on the text, see `scales_from_amax`."""
    scales = scales_from_amax(calibration.kv_amax, calibration.source or "", 1.0)
    kv_amax = tuple(zip(scales.k_amax, scales.v_amax, strict=True))
    return dataclasses.replace(calibration, kv_amax=kv_amax)


def _round(
    source: _Source, text: str, output: OutputFormat, on_progress: OnProgress
) -> tuple[dict[str, RoundedLayer], int]:
    """Weights rounded by GPTQ on all of a text, and the text's number of tokens."""
    folder, config = source.folder, source.model_config
    ids, _ = calibration_tokens(load_tokenizer(folder), config, text, max_tokens=sys.maxsize)
    check_vocabulary(config, ids)
    on_layer = partial(on_progress, "rounding")
    rounded = round_layers(folder, config, ids, source.selection, output, on_layer=on_layer)
    return rounded, ids.numel()


def _write_declaration(target: Path, source: _Source, output: OutputFormat) -> None:
    dialect = get_dialect(output.dialect)
    ignore = [source.index.stored_module(module) for module in source.selection.ignore]
    section = dialect.config_section(output, ignore)
    files = {
        **dialect.own_files(output, ignore),
        "config.json": {**source.config, "quantization_config": section},
    }
    for name, fields in files.items():
        write_json(target / name, fields)
