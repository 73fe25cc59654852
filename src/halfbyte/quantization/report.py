"""`quantization_report.json`: options, errors and sizes of a quantized checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfbyte.checkpoints.dialects.base import Dialect, OutputFormat
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.numerics import nvfp4
from halfbyte.quantization.calibrate_layers import CalibrationResult
from halfbyte.quantization.select_layers import LayerSelection
from halfbyte.quantization.write_layers import LayerReport

MXFP4: Literal["mxfp4"] = "mxfp4"
"""`format` and `weights` of a report on a checkpoint whose experts stay in MXFP4."""
OnProgress = Callable[[str, int, int], Any]
"""Called with the phase ("calibrating", "rounding" and "quantizing"; "measuring" and "copying"
where nothing but the cache is quantized), the number done and the total."""


@dataclass(frozen=True)
class QuantizationReport:
    """Options, errors and sizes of a quantized checkpoint.

    Args:
        format, weights, recipe, method, kv_cache_dtype: the arguments; the first two are `mxfp4`,
            and the next two None, if the source's experts stay in MXFP4.
        calibration: the calibration text, or None.
        layers: the error of each quantized layer.
        mean_sqnr_db, min_sqnr_db: over the layers with nonzero error; None if there are none.
        ignored: linear layers that are not quantized.
        source_bytes, bytes: of the safetensors files before and after.
    """

    format: Dialect | Literal["mxfp4"]
    weights: str
    recipe: nvfp4.Recipe | None
    method: str | None
    kv_cache_dtype: str | None
    calibration: str | None
    layers: tuple[LayerReport, ...]
    mean_sqnr_db: float | None
    min_sqnr_db: float | None
    ignored: tuple[str, ...]
    source_bytes: int
    bytes: int

    @classmethod
    def of(
        cls,
        output: OutputFormat,
        weights: str,
        method: str,
        selection: LayerSelection,
        calibration: CalibrationResult,
        layers: Sequence[LayerReport],
        index: CheckpointIndex,
        target: Path,
    ) -> "QuantizationReport":
        """Report of the folder `target` with all its weights; other arguments as in pipeline."""
        noisy = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
        return cls(
            format=output.dialect,
            weights=weights,
            recipe=output.recipe,
            method=method,
            kv_cache_dtype=output.kv_cache_dtype,
            calibration=calibration.source,
            layers=tuple(layers),
            mean_sqnr_db=sum(noisy) / len(noisy) if noisy else None,
            min_sqnr_db=min(noisy, default=None),
            ignored=selection.ignore,
            source_bytes=_source_size(index),
            bytes=_size(target.glob("*.safetensors")),
        )

    @classmethod
    def of_kept(
        cls,
        kv_cache_dtype: str,
        calibration: str,
        ignored: tuple[str, ...],
        index: CheckpointIndex,
        target: Path,
    ) -> "QuantizationReport":
        """Report of a copy with MXFP4 experts; arguments as of the class and of `of`."""
        return cls(
            format=MXFP4,
            weights=MXFP4,
            recipe=None,
            method=None,
            kv_cache_dtype=kv_cache_dtype,
            calibration=calibration,
            layers=(),
            mean_sqnr_db=None,
            min_sqnr_db=None,
            ignored=ignored,
            source_bytes=_source_size(index),
            bytes=_size(target.glob("*.safetensors")),
        )


def _source_size(index: CheckpointIndex) -> int:
    return _size({entry.file for entry in index.tensors.values()})


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
