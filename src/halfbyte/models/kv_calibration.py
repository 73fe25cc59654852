"""Calibration of K and V: runs a fixed text through a model once and measures each layer."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache as TransformersCache
from transformers import PreTrainedModel

from halfbyte.assets import calibration_text
from halfbyte.checkpoints.errors import one_line
from halfbyte.files import read_text
from halfbyte.kvcache import KVScales
from halfbyte.kvcache.scales import shape_of_model
from halfbyte.models.amax import AmaxRecorder, without_zeros
from halfbyte.models.attention_functions import GENERATE, register
from halfbyte.models.foreign_cache import release_cache_hooks
from halfbyte.models.key_statistics import KVRecorder

logger = logging.getLogger("halfbyte")

HEADROOM = 2.0
"""Scales allow for this factor over the largest magnitude seen. E4M3 block scales keep their
relative precision over a range of 28672, so a factor of two costs nothing; saturation would."""
MAX_TOKENS = 2048
"""Max tokens per row, and default number of calibration tokens."""
MIN_TOKENS = 256
"""Calibration on fewer tokens logs a warning."""
_FIXED_IDS = 512


def calibrate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    source: str,
    headroom: float = HEADROOM,
    *,
    first_tokens: Sequence[int] = (),
) -> KVScales:
    """Run tokens through a model once and measure K and V of each layer.

    Args:
        model: a transformers model; restored afterwards, but for the hooks of compressed-tensors
            that round K and V (`release_cache_hooks`).
        input_ids: int64 `[rows, tokens]`; rows are run one after the other.
        source: for the log.
        headroom: factor over the largest magnitude seen.
        first_tokens: ids that sequences usually begin with, see `usual_first_tokens`.

    Raises:
        ValueError: K or V that is not finite, or of every layer zero; ids that the model lacks.
    """
    check_vocabulary(model.config, input_ids, first_tokens)
    release_cache_hooks(model)
    recorder = KVRecorder(model, first_tokens, input_ids.shape[0])
    firsts = [torch.tensor([[token]], device="cpu") for token in first_tokens]
    run_rows(model, [*input_ids.split(1), *firsts], recorder)
    return kv_scales_of(recorder, model.config, source, headroom)


def check_vocabulary(
    config: Any, input_ids: torch.Tensor, first_tokens: Sequence[int] = ()
) -> None:
    """Raise ValueError if the tokenizer has ids outside the model's vocabulary."""
    ids = [*first_tokens, *([int(input_ids.max())] if input_ids.numel() else [])]
    largest = max(ids, default=0)
    if largest >= config.vocab_size:
        raise ValueError(
            f"calibration: the tokenizer has a token {largest}, the model a vocabulary of "
            f"{config.vocab_size}"
        )


def kv_scales_of(
    recorder: KVRecorder, config: Any, source: str, headroom: float = HEADROOM
) -> KVScales:
    """Scales from a recorder's measurements, with a calibration if they suffice for one."""
    scales = scales_from_amax(recorder.result(), source, headroom)
    scales = replace(scales, shape=shape_of_model(config))
    try:
        return replace(scales, calibration=recorder.calibration(headroom))
    except ValueError as error:
        logger.warning("%s: no recipe statistics, so only for kv_recipe plain: %s", source, error)
        return scales


def usual_first_tokens(tokenizer: Any) -> list[int]:
    """Ids that sequences of a tokenizer begin with: BOS, and the chat template's first token.

    Templates run for each conversation, and may refuse this one.
    """
    if tokenizer is None:
        return []
    found = [getattr(tokenizer, "bos_token_id", None)]
    found += list(tokenizer("a").input_ids[: len(tokenizer("").input_ids)])[:1]
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": "a"}]
        try:
            found += tokenizer.apply_chat_template(message, tokenize=True, return_dict=False)[:1]
        except Exception as error:  # templates raise errors of any type
            logger.info("the chat template's first token is not known: %s", one_line(error))
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def measure_amax(model: PreTrainedModel, input_ids: torch.Tensor) -> list[tuple[float, float]]:
    """Largest |K| and |V| of each layer as written to the cache (K after RoPE).

    Args:
        model: as for `calibrate`.
        input_ids: int64 `[rows, tokens]`.

    Raises:
        ValueError: K or V that is not finite.
    """
    recorder = AmaxRecorder()
    run_rows(model, input_ids.split(1), recorder)
    return recorder.result()


@torch.inference_mode()
def run_rows(
    model: PreTrainedModel,
    rows: Sequence[torch.Tensor],
    recorder: TransformersCache,
    on_row: Callable[[int, int], Any] = lambda done, total: None,
) -> None:
    """Run rows of tokens with halfbyte's attention, one after the other.

    Args:
        model: left as it was.
        rows: int64 `[1, tokens]`.
        recorder: a cache that sees K and V of every layer and keeps none.
        on_row: called with the rows done and in all.
    """
    training, attention = model.training, model.config._attn_implementation
    # The same attention for all callers, so that all get the same scales.
    register()
    model.set_attn_implementation(GENERATE)
    try:
        model.eval()
        for done, row in enumerate(rows):
            model(
                input_ids=row.to(model.device),
                past_key_values=recorder,
                use_cache=True,
                logits_to_keep=1,  # logits of all tokens may take gigabytes
            )
            on_row(done + 1, len(rows))
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def scales_from_amax(
    amax: Sequence[tuple[float, float]], source: str, headroom: float = HEADROOM
) -> KVScales:
    """Scales from measured amax.

    A layer that was all zero on the text gets the median of the other layers (separately for K
    and V), with a log message: its real magnitudes are unknown, and a scale of 1 would be a guess.

    Args:
        amax: `(K, V)` of each layer, finite and not negative.
        source: for the log.
        headroom: factor over the largest magnitude seen.

    Raises:
        ValueError: one side is zero in every layer.
    """
    sides = []
    for side, measured in zip("KV", zip(*amax, strict=True), strict=True):
        values = without_zeros(measured, side, source)
        zeros = [layer for layer, value in enumerate(measured) if not value]
        if zeros:
            logger.warning(
                "%s: %s is all zero in layer %s; scaled by the other layers' median, %.4g",
                source,
                side,
                ", ".join(map(str, zeros)),
                values[zeros[0]],
            )
        sides.append(tuple(headroom * value for value in values))
    return KVScales(sides[0], sides[1], source)


def read_calibration_text(file: str | Path | None, argument: str) -> str:
    """Read the calibration text; by default the built-in one.

    Args:
        file: of UTF-8 text.
        argument: its name in messages.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is empty; one line.
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
    """Calibration tokens, and a description of their source for the log.

    Args:
        tokenizer: of the model; None for a fixed sequence of at most 512 token ids.
        config: transformers config of the model.
        text: to encode.
        name: of the text, for the log.
        max_tokens: of the text; by default the model's context, at most 2,048.

    Returns:
        int64 `[rows, tokens]`, with rows of the model's context length or slightly less, so that
        all are equally long (drops less than one token per row); and the source.

    Raises:
        ValueError: `max_tokens` below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: expected a number above 0, got {max_tokens}")
    window = _window(config)
    limit = max_tokens or window
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        shape = (1, min(limit, window, _FIXED_IDS))
        ids = torch.randint(0, config.vocab_size, shape, generator=generator, device="cpu")
        what = f"{ids.shape[1]} fixed token ids (the model has no tokenizer)"
        return ids, f"calibration on {what}"
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :limit]
    rows = -(-ids.shape[1] // window)
    ids = ids[:, : ids.shape[1] // rows * rows].reshape(rows, -1)
    return ids, f"calibration on {ids.numel()} tokens of {name}"


def warn_of_few_tokens(count: int, config: Any) -> None:
    """Log a warning for fewer calibration tokens than `MIN_TOKENS`, or than a shorter context.

    Args:
        count: of tokens.
        config: as for `calibration_tokens`.
    """
    if count < min(MIN_TOKENS, _window(config)):
        logger.warning(
            "calibration on only %d tokens: K and V of other text may exceed scales measured on "
            "fewer than %d, and recipes would subtract the means of these few",
            count,
            MIN_TOKENS,
        )


def _window(config: Any) -> int:
    """Max tokens per row."""
    return min(MAX_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)
