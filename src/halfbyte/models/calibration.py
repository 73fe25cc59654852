"""The largest |K| and |V| of each layer, measured by running a fixed text through a model once."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from halfbyte.assets import calibration_text, read_text
from halfbyte.kvcache import KVScales
from halfbyte.models.attention_functions import GENERATE, register

logger = logging.getLogger("halfbyte")

HEADROOM = 2.0
"""Largest magnitude allowed for, over the largest one seen. E4M3 block scales keep their relative
precision over a range of 28672, so a factor of two costs nothing, while saturation would."""
MAX_TOKENS = 2048
"""Tokens that a model sees at once, and by default all that it is calibrated on."""
_FIXED_IDS = 512


def calibrate(
    model: PreTrainedModel, input_ids: torch.Tensor, source: str, headroom: float = HEADROOM
) -> KVScales:
    """Run tokens through a model once and record the largest |K| and |V| of each layer.

    Args:
        model: a transformers model; it is left as it was.
        input_ids: int64 `[rows, tokens]`; rows are run one after the other.
        source: for the log.
        headroom: factor over the largest magnitude seen.

    Raises:
        ValueError: K or V that is not finite, or of every layer zero.
    """
    return scales_from_amax(measure_amax(model, input_ids), source, headroom)


@torch.inference_mode()
def measure_amax(model: PreTrainedModel, input_ids: torch.Tensor) -> list[tuple[float, float]]:
    """Largest |K| and |V| of each layer, as the cache gets them (K after RoPE).

    Args:
        model: as for `calibrate`.
        input_ids: int64 `[rows, tokens]`.

    Raises:
        ValueError: K or V that is not finite.
    """
    recorder = AmaxRecorder()
    training, attention = model.training, model.config._attn_implementation
    # One attention for all callers, so that a model has the same scales whoever asks first.
    register()
    model.set_attn_implementation(GENERATE)
    try:
        model.eval()
        for row in input_ids.to(model.device).split(1):
            model(input_ids=row, past_key_values=recorder, use_cache=True)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
    return recorder.result()


class AmaxRecorder(DynamicCache):
    """A cache that notes the largest magnitudes passing through it, and keeps nothing else."""

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
        """See `transformers.Cache`: what came in, as if it were the first chunk."""
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


def scales_from_amax(
    amax: Sequence[tuple[float, float]], source: str, headroom: float = HEADROOM
) -> KVScales:
    """Scales of measured magnitudes.

    A layer that was all zero on the text gets the median of the other layers, K and V apart, and
    the log says so: of what it will hold nothing is known, and a scale of 1 would be a guess.

    Args:
        amax: `(K, V)` of each layer, finite and not negative.
        source: for the log.
        headroom: factor over the largest magnitude seen.

    Raises:
        ValueError: one side is zero in every layer.
    """
    sides = []
    for i, side in enumerate("KV"):
        values = [pair[i] for pair in amax]
        zeros = [layer for layer, value in enumerate(values) if value == 0]
        if zeros:
            others = [value for value in values if value]
            if not others:
                raise ValueError(
                    f"{source}: {side} is zero in every layer, expected one that is not"
                )
            fill = median(others)
            logger.warning(
                "%s: %s is all zero in layer %s; scaled by the other layers' median, %.4g",
                source,
                side,
                ", ".join(map(str, zeros)),
                fill,
            )
            values = [value or fill for value in values]
        sides.append(tuple(headroom * value for value in values))
    return KVScales(sides[0], sides[1], source)


def read_calibration_text(file: str | Path | None, argument: str) -> str:
    """A text to calibrate on; by default the built-in one.

    Args:
        file: of UTF-8 text.
        argument: its name in messages.

    Raises:
        ValueError: it cannot be read, is no UTF-8, or is empty; one line.
    """
    if file is None:
        return calibration_text()
    try:
        text = read_text(file)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
    if not text.strip():
        raise ValueError(f"{argument}: {file}: is empty, expected a text to calibrate on")
    return text


def calibration_tokens(
    tokenizer: Any,
    config: Any,
    text: str,
    name: str = "the built-in text",
    max_tokens: int | None = None,
) -> tuple[torch.Tensor, str]:
    """Tokens to calibrate on, and what they are, for the log.

    Args:
        tokenizer: of the model; None for a fixed sequence of at most 512 token ids.
        config: transformers config of the model.
        text: to encode.
        name: of the text, for the log.
        max_tokens: of the text; by default as many as the model sees at once, at most 2,048.

    Returns:
        int64 `[rows, tokens]`, rows as long as the model sees at once or a little shorter, so that
        all are equally long (less than a token per row is left out of the text); and the source.

    Raises:
        ValueError: `max_tokens` below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: expected a number above 0, got {max_tokens}")
    window = min(MAX_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)
    limit = max_tokens or window
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        shape = (1, min(limit, window, _FIXED_IDS))
        ids = torch.randint(0, config.vocab_size, shape, generator=generator)
        what = f"{ids.shape[1]} fixed token ids (the model has no tokenizer)"
        return ids, f"calibration on {what}"
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :limit]
    rows = -(-ids.shape[1] // window)
    ids = ids[:, : ids.shape[1] // rows * rows].reshape(rows, -1)
    return ids, f"calibration on {ids.numel()} tokens of {name}"
