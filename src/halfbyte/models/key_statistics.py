"""Measures what recipes need of a model's K and V: means, amax, first tokens, error costs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.kvcache.calibration import ErrorCosts, KVCalibration, LayerCalibration
from halfbyte.kvcache.recipe import SEGMENT
from halfbyte.kvcache.transform import KVTransform
from halfbyte.models.amax import AmaxRecorder, without_zeros
from halfbyte.models.attention_functions import KVHandle, dense_attention
from halfbyte.models.output_energy import output_energy
from halfbyte.models.rotary import RotaryProbe
from halfbyte.models.second_moment import SecondMoment

_FIRST_OF_MEAN = 4
"""Leading tokens excluded from the means: their K differs from that of later tokens."""
_FIRST_OF_QUERIES = 8
"""Leading tokens whose queries are excluded: they mainly attend to the first token."""
_DEFAULT_POSITIONS = 2**17
_MAX_POSITIONS = 2**20
"""Longer sequences are refused with K centred: a million positions take 1.5 s to average."""
_POSITIONS_OF_QUERIES = 2**15
"""Positions over which E[q q^T] is averaged, whatever the model's context, so that no position up
to 32k is favoured. SmolLM2, with a context of 8,192, is as accurate as with an average over it."""

_Row = tuple[torch.Tensor, torch.Tensor]
"""K and V of a row: `[tokens, kv_heads, D]`."""


class KVRecorder(AmaxRecorder):
    """A cache that measures Q, K and V and stores no tokens.

    Needs the attention function `GENERATE`, which passes it the queries. Expects the rows of the
    text first, then one row for each of `first_tokens`, of which only position 0 counts. A layer's
    K is held until all rows have arrived; both orders work, layer by layer and row by row.

    Args:
        model: the model; its rotary embedding gives the angles.
        first_tokens: ids at position 0 of the rows after the text.
        text_rows: number of rows of the text.
        segment: tokens per mean.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        first_tokens: Sequence[int],
        text_rows: int,
        segment: int = SEGMENT,
    ) -> None:
        super().__init__()
        self._base: Any = model.base_model
        config = model.config
        kinds = list(getattr(config, "layer_types", None) or ())
        parameters = getattr(config, "rope_parameters", None) or {}
        if not all(isinstance(parameters.get(kind), Mapping) for kind in kinds or [""]):
            kinds = [None] * config.num_hidden_layers  # one rotary embedding for all layers
        different = list(dict.fromkeys(kinds))
        self._probes = [RotaryProbe(model, kind) for kind in different]
        self._rope_of = [different.index(kind) for kind in kinds]
        positions = getattr(config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
        positions = min(positions, _MAX_POSITIONS)
        self._averages = [probe.averages(positions, segment) for probe in self._probes]
        self._of_moments = [probe.moment_average(_POSITIONS_OF_QUERIES) for probe in self._probes]
        self._first_tokens = tuple(first_tokens)
        self._text_rows = text_rows
        self._segment = segment
        self._held: dict[int, list[_Row]] = defaultdict(list)
        self._queries: dict[int, SecondMoment] = defaultdict(SecondMoment)
        self._measured: dict[int, LayerCalibration] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See `AmaxRecorder.update`; handles of K and V for the attention."""
        rows = self._held[layer_idx]
        for key, value in zip(key_states, value_states, strict=True):
            if len(rows) < self._text_rows:
                super().update(key, value, layer_idx)
                rows.append((key.transpose(0, 1), value.transpose(0, 1)))
            else:
                rows.append((key[:, :1].transpose(0, 1), value[:, :1].transpose(0, 1)))
        handle = KVHandle(self, layer_idx, key_states, value_states)
        return handle, handle

    def attend(
        self,
        handle: KVHandle,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend to the handle's K and V only, see `PackedCache`; measures queries of the text."""
        layer, rows = handle.layer, self._held[handle.layer]
        queries, probe = self._queries[layer], self._probes[self._rope_of[layer]]
        before = len(rows) - len(query)
        for row in query[: max(0, self._text_rows - before)]:
            by_token = probe.unrotate(row.transpose(0, 1))[_FIRST_OF_QUERIES:]
            queries.add(
                by_token.transpose(0, 1).unflatten(0, (handle.key.shape[1], -1)).flatten(1, 2)
            )
        if len(rows) == self._text_rows + len(self._first_tokens):
            measured = self._measure(layer, self._held.pop(layer))
            costs = self._costs(layer, query, handle.value)
            self._measured[layer] = replace(measured, costs=costs)
        return dense_attention(query, handle.key, handle.value, mask, options)

    def calibration(self, headroom: float) -> KVCalibration:
        """The measurements, with `headroom` applied to amax.

        Raises:
            ValueError: K or V is zero in every layer after the first token.
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
        unrotate = self._probes[rope].unrotate
        before = torch.cat([unrotate(key)[_FIRST_OF_MEAN:] for key, _ in texts])
        mean = before.double().mean(0).float() if len(before) else texts[0][0][0].float() * 0
        mean, averages = mean.cpu(), self._averages[rope]
        fields = {"cos": averages.cos, "sin": averages.sin, "partner": averages.partner}
        # In the order of `LayerCalibration.k_amax`.
        transforms = [
            KVTransform(rotate, self._segment, **({"mean": mean, **fields} if center else {}))
            for center in (False, True)
            for rotate in (False, True)
        ]
        k_amax, v_amax = torch.zeros(4, dtype=torch.float32, device="cpu"), 0.0
        for key, value in texts:
            x, positions = key.cpu(), torch.arange(key.shape[0], device="cpu")
            seen = [_amax(transform.forward(x, positions)) for transform in transforms]
            k_amax = torch.maximum(k_amax, torch.tensor(seen, device="cpu"))  # keeps a NaN
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

    def _costs(self, layer: int, query: torch.Tensor, value: torch.Tensor) -> ErrorCosts:
        kv_heads, size = value.shape[1], value.shape[3]
        # Only here: a model streamed layer by layer has these weights only now.
        projection = self._base.layers[layer].self_attn.o_proj
        inputs = query.shape[1] * size
        energy = output_energy(projection, inputs, query.dtype, query.device)
        by_head = energy.unflatten(0, (kv_heads, -1, size)).sum(1)
        # RoPE turns the queries of later positions into directions that the text does not have.
        before_rope = self._queries.pop(layer).mean().cpu()
        moment = self._of_moments[self._rope_of[layer]].of(before_rope)
        return ErrorCosts.of(moment, by_head)


def _amax(x: torch.Tensor) -> float:
    """Largest magnitude of all tokens but the first."""
    return float(x[1:].abs().amax()) if len(x) > 1 else 0.0
