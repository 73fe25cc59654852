"""Step 2: calibration. Measures amax of every layer's input, and of K and V.

The unquantized model runs once on a text. The amax of an input becomes its global scale without
headroom, as in ModelOpt and llm-compressor; larger values later saturate.

All experts of a layer share one amax per projection: engines use one scale for all of them, and an
expert that the text never reached would have none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.models.kv_calibration import MAX_TOKENS, check_vocabulary, measure_amax
from halfbyte.quantization.linear_inputs import LinearInputs
from halfbyte.quantization.select_layers import ParameterName, experts_projection


@dataclass(frozen=True)
class CalibrationResult:
    """Largest magnitudes seen while the model ran.

    Args:
        input_amax: of the input of each quantized layer.
        kv_amax: `(K, V)` of each decoder layer.
        source: the calibration text, for the report.
    """

    input_amax: Mapping[str, float] = field(default_factory=dict)
    kv_amax: tuple[tuple[float, float], ...] = ()
    source: str | None = None


def calibrate_layers(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    modules: Sequence[str],
    source: str,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> CalibrationResult:
    """Run a model on a text and record the largest magnitudes.

    Args:
        model: unquantized; not modified.
        token_ids: int64 `[1, tokens]`, split into windows of at most 2,048 tokens.
        modules: names, as in checkpoints, of the layers whose input is measured.
        source: description of the text, for the report.
        on_progress: called with the number of tokens done and the total.

    Returns:
        With `input_amax` for each of `modules` and `kv_amax` for each layer.

    Raises:
        CheckpointError: a layer that never ran, or one whose input is not finite.
        ValueError: K or V that is not finite; ids that the model lacks.
    """
    check_vocabulary(model.config, token_ids)
    window = min(MAX_TOKENS, getattr(model.config, "max_position_embeddings", MAX_TOKENS))
    total = token_ids.shape[1]
    kv_amax: list[tuple[float, float]] | None = None
    with _linear_experts(model), _InputAmax(model, modules) as recorder:
        for start in range(0, total, window):
            seen = measure_amax(model, token_ids[:, start : start + window])
            if kv_amax is None:
                kv_amax = seen
            else:
                pairs = zip(kv_amax, seen, strict=True)
                kv_amax = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in pairs]
            on_progress(min(start + window, total), total)
    return CalibrationResult(recorder.result(), tuple(kv_amax or ()), source)


class _InputAmax(LinearInputs[ParameterName]):
    """Records the largest magnitude of each weight's input."""

    def __init__(self, model: PreTrainedModel, modules: Sequence[str]) -> None:
        super().__init__()
        self._key_of = {
            name: experts_projection(name) or ParameterName(name, "weight") for name in modules
        }
        self._amax: dict[ParameterName, torch.Tensor] = {}
        for key in dict.fromkeys(self._key_of.values()):
            parameter = getattr(model.get_submodule(key.module), key.parameter)
            matrices = parameter if parameter.dim() == 3 else [parameter]
            for matrix in matrices:
                self.watch(matrix, key)

    def record(self, key: ParameterName, x: torch.Tensor) -> None:
        """See `LinearInputs`."""
        seen = x.detach().abs().amax()
        before = self._amax.get(key)
        self._amax[key] = seen if before is None else torch.maximum(before, seen)

    def result(self) -> dict[str, float]:
        """amax of the input of each layer."""
        amax = {key: float(value) for key, value in self._amax.items()}
        for module, key in self._key_of.items():
            if not math.isfinite(amax.get(key, math.nan)):
                raise CheckpointError(
                    f"{module}: expected a finite amax of its calibration inputs, "
                    f"found {amax.get(key, 'no input: no token of the text was routed to it')}"
                )
        return {module: amax[key] for module, key in self._key_of.items()}


@contextmanager
def _linear_experts(model: PreTrainedModel) -> Iterator[None]:
    """Make fused experts, if any, call `F.linear` expert by expert."""
    before = getattr(model.config, "_experts_implementation", None)
    if not model._can_set_experts_implementation():
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before or "eager")
