"""`quantization_report.json`: options, errors and sizes of a quantized checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoints.dialects.base import Dialect, OutputFormat
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.numerics import nvfp4
from halfbyte.quantization.calibrate_layers import CalibrationResult
from halfbyte.quantization.select_layers import LayerSelection
from halfbyte.quantization.write_layers import LayerReport


@dataclass(frozen=True)
class QuantizationReport:
    """Options, errors and sizes of a quantized checkpoint.

    Args:
        format, weights, recipe, method, kv_cache_dtype: the arguments.
        calibration: the calibration text, or None.
        layers: the error of each quantized layer.
        mean_sqnr_db, min_sqnr_db: over the layers with nonzero error; None if there are none.
        ignored: linear layers that are not quantized.
        source_bytes, bytes: of the safetensors files before and after.
    """

    format: Dialect
    weights: str
    recipe: nvfp4.Recipe
    method: str
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
            source_bytes=_size({entry.file for entry in index.tensors.values()}),
            bytes=_size(target.glob("*.safetensors")),
        )


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
