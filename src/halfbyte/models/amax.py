"""Largest |K| and |V| of each layer: recorder, and replacement of zeros."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache


class AmaxRecorder(DynamicCache):
    """A cache that records the largest |K| and |V| of each layer and stores no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._amax: dict[int, torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `transformers.Cache`: returns its input, as if it were the first chunk."""
        seen = torch.stack([x.abs().amax().float() for x in (key_states, value_states)])
        before = self._amax.get(layer_idx, seen)
        self._amax[layer_idx] = torch.maximum(before, seen)  # keeps a NaN
        return key_states, value_states

    def result(self) -> list[tuple[float, float]]:
        """`(K, V)` of each layer.

        Raises:
            ValueError: a magnitude that is not finite.
        """
        amax = [self._amax[layer].tolist() for layer in range(len(self._amax))]
        for layer, pair in enumerate(amax):
            for side, value in zip("KV", pair, strict=True):
                if not math.isfinite(value):
                    raise ValueError(
                        f"calibration: the largest |{side}| of layer {layer} is {value}, expected "
                        "a finite number"
                    )
        return [(k, v) for k, v in amax]


def without_zeros(amax: Sequence[float], side: str, source: str) -> list[float]:
    """amax of every layer; layers with 0 get the median of the other layers.

    Args:
        amax: finite and not negative.
        side: K or V, for the message.
        source: where it was measured, for the message.

    Raises:
        ValueError: it is zero in every layer.
    """
    others = [value for value in amax if value]
    if not others:
        raise ValueError(f"{source}: {side} is zero in every layer, expected one that is not")
    fill = median(others)
    return [value or fill for value in amax]
