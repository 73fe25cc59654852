"""Perplexity with K and V read back from the packed cache, compared with a bfloat16 cache.

Text is split into windows, each run in chunks of C tokens. Every chunk attends to the cache,
including its own tokens. C = 1 is true decoding. A single dense prefill that never reads the cache
would report every format as lossless.

All formats advance in lockstep, so that the divergence from bfloat16 is summed chunk by chunk and
no logits are kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from halfbyte.evaluation.caches import CacheName, MeasuredCache, names_and_scales
from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.layouts import KVCacheDType

BASELINE = KVCacheDType.BFLOAT16
POSITIONS = 2048
"""Tokens per value in `PerplexityResult.kl_by_position`."""
_MAX_LOGITS = 2**26
"""Logits of one format held at once: 256 MiB in float32."""


@dataclass(frozen=True)
class PerplexityResult:
    """Results of one format and recipe.

    `perplexity` is exp of `nll`, the mean negative log-likelihood per predicted token in nats;
    `nll_increase` is its mean increase over a bfloat16 cache, and `nll_increase_stderr` the
    standard error of that mean, treating tokens as independent; `top1` is the share of tokens for
    which both caches have the same most likely next token; `kl_divergence` is the mean
    KL(bfloat16 cache || this cache) per predicted token in nats, and `kl_by_position` the same for
    each `POSITIONS` tokens of the context; `bytes_per_token` is the cache's bytes per token over
    all layers; `bits_per_byte` is the bits of the whole text over its bytes in UTF-8 (None if the
    text was given as ids).
    """

    kv_cache_dtype: str
    kv_recipe: str
    perplexity: float
    nll: float
    nll_increase: float
    nll_increase_stderr: float
    top1: float
    kl_divergence: float
    kl_by_position: tuple[float, ...]
    bytes_per_token: float
    bits_per_byte: float | None
    chunk_size: int
    tokens: int


class _Sums:
    """Running sums of one format and recipe.

    Args:
        num_tokens: of the longest window.
    """

    def __init__(self, num_tokens: int) -> None:
        self.nll = 0.0
        ranges = -(-num_tokens // POSITIONS)
        self.kl = torch.zeros(ranges, dtype=torch.float64, device="cpu")
        self.rows = torch.zeros(ranges, dtype=torch.int64, device="cpu")
        self.increase = self.squared_increase = 0.0
        self.same_top1 = 0

    def add(
        self,
        log_p: torch.Tensor,
        baseline: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Add a chunk's rows of log probabilities that have a target, with their positions."""
        ranges = positions // POSITIONS
        self.rows += ranges.bincount(minlength=len(self.rows))
        self.nll -= float(log_p[rows, targets].sum(dtype=torch.float64))
        if log_p is baseline:
            self.same_top1 += len(rows)
            return
        expected, found = baseline[rows], log_p[rows]
        divergence = ((expected - found) * expected.exp()).sum(-1, dtype=torch.float64)
        self.kl.index_add_(0, ranges, divergence.cpu())
        increase = (baseline[rows, targets] - log_p[rows, targets]).double()
        self.increase += float(increase.sum())
        self.squared_increase += float(increase.square().sum())
        self.same_top1 += int((expected.argmax(-1) == found.argmax(-1)).sum())


def evaluate_perplexity(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    chunk_size: int = 512,
    *,
    num_bytes: int | None = None,
    kv_scales: KVScales | None = None,
    kv_recipes: Sequence[str | KVRecipe] | None = None,
    tokenizer: object = None,
    block_size: int = 16,
    attention_backend: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PerplexityResult]:
    """Measure formats on windows of tokens.

    Args:
        model: a transformers model of a supported architecture.
        windows: token ids; the first of each is given, the rest are predicted.
        kv_cache_dtypes: formats to measure; `auto` is the checkpoint's or the model's dtype.
        chunk_size: tokens per step.
        num_bytes: UTF-8 bytes of the predicted tokens' text.
        kv_scales, tokenizer: as for `resolve_kv_scales`.
        kv_recipes: for NVFP4 formats, by default that of `default_recipe`; other formats use only
            `plain`.
        block_size: tokens per page.
        attention_backend: name of an attention backend, or None to choose.
        on_progress: called with (tokens done, tokens in all), over all formats.

    Returns:
        Results in the order of `kv_cache_dtypes`, and of `kv_recipes` for those of NVFP4.

    Raises:
        ValueError: a chunk size below 1, a window without a token to predict or longer than the
            model's context, or a format that is unknown or cannot store the model's head size.
    """
    _check(model, windows, chunk_size)
    names, scales = names_and_scales(
        model, kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, attention_backend
    )
    baseline_name = CacheName(BASELINE, KVRecipe())
    scales.setdefault(baseline_name, None)
    unique = list(dict.fromkeys([baseline_name, *names]))
    vocabulary = model.config.vocab_size
    at_once = max(1, min(len(windows), _MAX_LOGITS // (chunk_size * vocabulary)))
    longest = max(len(window) for window in windows)
    caches = {
        name: MeasuredCache(
            model, name, scales[name], longest, at_once, block_size, attention_backend
        )
        for name in unique
    }
    sums = {name: _Sums(longest) for name in unique}
    total = sum(len(window) for window in windows) * len(caches)
    done = 0
    with caches[baseline_name].runner.attached():
        for first in range(0, len(windows), at_once):
            group = list(enumerate(windows[first : first + at_once]))
            for cache in caches.values():
                for seq, _ in group:
                    cache.tables.add(seq)
            for start in range(0, max(len(window) for _, window in group), chunk_size):
                chunks = [
                    (seq, list(window[start : start + chunk_size]))
                    for seq, window in group
                    if start < len(window)
                ]
                rows, targets, positions = _targets(chunks, dict(group), start, model.device)
                baseline = torch.empty(0, device="cpu")
                for name in unique:
                    log_p = caches[name].log_probabilities(chunks)
                    baseline = log_p if name == baseline_name else baseline
                    sums[name].add(log_p, baseline, targets, rows, positions)
                    done += sum(len(ids) for _, ids in chunks)
                    on_progress(done, total)
            for cache in caches.values():
                for seq, _ in group:
                    cache.tables.free(seq)
    predicted = sum(len(window) - 1 for window in windows)
    return [_result(caches[name], sums[name], predicted, chunk_size, num_bytes) for name in names]


def text_windows(
    tokenizer: object, texts: Sequence[str], window: int, max_tokens: int | None = None
) -> tuple[list[list[int]], int]:
    """Split texts into windows of tokens.

    Args:
        tokenizer: of transformers.
        texts: each starts a new window.
        window: tokens per window, the first (given, not predicted) included.
        max_tokens: max tokens in total.

    Returns:
        `(windows, bytes)`: every window begins with the tokenizer's beginning-of-text token where
        it has one, else with its first token, which then is not predicted; and the UTF-8 bytes of
        the predicted tokens.

    Raises:
        ValueError: there is nothing to predict.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens: expected at least 2, got {max_tokens}")
    bos = getattr(tokenizer, "bos_token_id", None)
    prefix = [] if bos is None else [bos]
    step = window - len(prefix)
    windows: list[list[int]] = []
    num_bytes = taken = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]
        end = 0
        for start in range(0, len(ids), step):
            if max_tokens is not None and taken >= max_tokens:
                break
            chunk = prefix + ids[start : start + step]
            if max_tokens is not None:
                chunk = chunk[: max(2, max_tokens - taken)]
            if len(chunk) < 2:
                continue
            windows.append(chunk)
            taken += len(chunk)
            end = start + len(chunk) - len(prefix)
            if not prefix:  # its first token is given, not predicted
                num_bytes -= _num_bytes(tokenizer, chunk[:1])
        # Windows may cut characters in two, so bytes are counted per text.
        num_bytes += len(text.encode()) if end == len(ids) else _num_bytes(tokenizer, ids[:end])
    if not windows:
        raise ValueError("text: has no token to predict")
    return windows, num_bytes


def _num_bytes(tokenizer: object, ids: list[int]) -> int:
    """UTF-8 bytes of tokens, without half a character at the end."""
    text: str = tokenizer.decode(ids)  # type: ignore[attr-defined]
    return len(text.rstrip("\ufffd").encode())


def _check(model: PreTrainedModel, windows: Sequence[Sequence[int]], chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    if not windows or min(len(window) for window in windows) < 2:
        raise ValueError("windows: expected one or more windows of at least 2 tokens")
    context = getattr(model.config, "max_position_embeddings", 2**31)
    longest = max(len(window) for window in windows)
    if longest > context:
        raise ValueError(f"windows: {longest} tokens exceed the model's context of {context}")


def _targets(
    chunks: Sequence[tuple[int, list[int]]],
    windows: dict[int, Sequence[int]],
    start: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the chunks' logits that have a target, their target tokens, and, on the CPU, their
    positions."""
    rows: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    offset = 0
    for seq, ids in chunks:
        following = windows[seq][start + 1 : start + 1 + len(ids)]
        rows += range(offset, offset + len(following))
        targets += following
        positions += range(start, start + len(following))
        offset += len(ids)
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(targets, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device="cpu"),
    )


def _result(
    cache: MeasuredCache, sums: _Sums, predicted: int, chunk_size: int, num_bytes: int | None
) -> PerplexityResult:
    nll, increase = sums.nll / predicted, sums.increase / predicted
    variance = max(0.0, sums.squared_increase / predicted - increase**2)
    return PerplexityResult(
        kv_cache_dtype=cache.dtype.value,
        kv_recipe=cache.recipe.name,
        perplexity=math.exp(nll) if nll < 700 else math.inf,
        nll=nll,
        nll_increase=increase,
        nll_increase_stderr=math.sqrt(variance / predicted),
        top1=sums.same_top1 / predicted,
        kl_divergence=float(sums.kl.sum()) / predicted,
        kl_by_position=tuple((sums.kl / sums.rows.clamp(min=1)).tolist()),
        bytes_per_token=cache.bytes_per_token,
        bits_per_byte=sums.nll / math.log(2) / num_bytes if num_bytes else None,
        chunk_size=chunk_size,
        tokens=predicted,
    )
