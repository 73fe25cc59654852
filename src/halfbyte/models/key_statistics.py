"""Measures what recipes need to know of a model's K and V: means, magnitudes, first tokens."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.kvcache.calibration import KVCalibration, LayerCalibration
from halfbyte.kvcache.recipe import SEGMENT
from halfbyte.kvcache.transform import KVTransform
from halfbyte.models.amax import AmaxRecorder, without_zeros
from halfbyte.models.rotary import RotaryProbe

_FIRST_OF_MEAN = 4
"""The first tokens' K is unlike the others'."""
_DEFAULT_POSITIONS = 2**17

_Row = tuple[torch.Tensor, torch.Tensor]
"""K and V of a row: `[tokens, kv_heads, D]`."""


class KVRecorder(AmaxRecorder):
    """A cache that measures K and V as they pass through it, and keeps no tokens.

    The rows of a text come first, then a row for each of `first_tokens`, of which position 0 alone
    counts; a layer's K is held until all of them have come, layer by layer or row by row.

    Args:
        model: whose layers they are; its rotary embedding is asked for its angles.
        first_tokens: ids at position 0 of the rows behind the text's.
        text_rows: how many there are before.
        segment: tokens that share a mean.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        first_tokens: Sequence[int],
        text_rows: int,
        segment: int = SEGMENT,
    ) -> None:
        super().__init__()
        config = model.config
        kinds = list(getattr(config, "layer_types", None) or ())
        parameters = getattr(config, "rope_parameters", None) or {}
        if not all(isinstance(parameters.get(kind), Mapping) for kind in kinds or [""]):
            kinds = [None] * config.num_hidden_layers  # one rotary embedding for all layers
        different = list(dict.fromkeys(kinds))
        self._probes = [RotaryProbe(model, kind) for kind in different]
        self._rope_of = [different.index(kind) for kind in kinds]
        positions = getattr(config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
        self._averages = [probe.averages(positions, segment) for probe in self._probes]
        self._first_tokens = tuple(first_tokens)
        self._text_rows = text_rows
        self._segment = segment
        self._held: dict[int, list[_Row]] = defaultdict(list)
        self._measured: dict[int, LayerCalibration] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AmaxRecorder.update`."""
        rows = self._held[layer_idx]
        for key, value in zip(key_states, value_states, strict=True):
            if len(rows) < self._text_rows:
                super().update(key, value, layer_idx)
                rows.append((key.transpose(0, 1), value.transpose(0, 1)))
            else:
                rows.append((key[:, :1].transpose(0, 1), value[:, :1].transpose(0, 1)))
        if len(rows) == self._text_rows + len(self._first_tokens):
            self._measured[layer_idx] = self._measure(layer_idx, self._held.pop(layer_idx))
        return key_states, value_states

    def calibration(self, headroom: float) -> KVCalibration:
        """What was measured, with a headroom over the magnitudes.

        Raises:
            ValueError: K or V is zero in every layer, past the first token.
        """
        measured = [self._measured[layer] for layer in range(len(self._measured))]
        columns = zip(*((*layer.k_amax, layer.v_amax) for layer in measured), strict=True)
        *k_amax, v_amax = (
            [headroom * value for value in without_zeros(column, side, "tokens past the first")]
            for side, column in zip("KKKKV", columns, strict=True)
        )
        layers = [
            replace(layer, k_amax=tuple(column[i] for column in k_amax), v_amax=v_amax[i])
            for i, layer in enumerate(measured)
        ]
        return KVCalibration(
            self._segment, self._first_tokens, tuple(layers), tuple(self._averages)
        )

    def _measure(self, layer: int, rows: list[_Row]) -> LayerCalibration:
        texts, firsts = rows[: self._text_rows], rows[self._text_rows :]
        rope = self._rope_of[layer]
        turned_back = self._probes[rope].turned_back
        before = torch.cat([turned_back(key)[_FIRST_OF_MEAN:] for key, _ in texts])
        mean = before.double().mean(0).float() if len(before) else texts[0][0][0].float() * 0
        mean, averages = mean.cpu(), self._averages[rope]
        fields = {"cos": averages.cos, "sin": averages.sin, "partner": averages.partner}
        # In the order of `LayerCalibration.k_amax`.
        transforms = [
            KVTransform(rotate, self._segment, **({"mean": mean, **fields} if center else {}))
            for center in (False, True)
            for rotate in (False, True)
        ]
        k_amax, v_amax = torch.zeros(4), 0.0
        for key, value in texts:
            x, positions = key.cpu(), torch.arange(key.shape[0])
            seen = [_amax(transform.forward(x, positions)) for transform in transforms]
            k_amax = torch.maximum(k_amax, torch.tensor(seen))  # keeps a NaN
            v_amax = max(v_amax, _amax(value))
        k0, k1, k2, k3 = k_amax.tolist()
        key, value = texts[0]
        return LayerCalibration(
            mean,
            (k0, k1, k2, k3),
            v_amax,
            torch.cat([k for k, _ in firsts] or [key[:0]]).cpu(),
            torch.cat([v for _, v in firsts] or [value[:0]]).cpu(),
            rope,
        )


def _amax(x: torch.Tensor) -> float:
    """Largest magnitude of all tokens but the first."""
    return float(x[1:].abs().amax()) if len(x) > 1 else 0.0
