"""Logits processors for all requests of a batch at once.

Uses transformers' processors where they exist. These take one parameter for all rows, so rows with
equal parameters (usually all of them) are processed together. Nothing here syncs with the GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from halfbyte.engine.request import Request
from halfbyte.engine.token_counts import TokenCounts

_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smallest normal float32."""


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy values to a device without a sync."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def penalize(
    requests: Sequence[Request], scores: torch.Tensor, num_unread: int = 0
) -> torch.Tensor:
    """Apply penalties and `min_tokens`.

    Args:
        requests: of the rows.
        scores: float32 `[requests, vocabulary]`; stays as it is.
        num_unread: tokens per request that are sampled, but not in its output yet. Penalties
            need these tokens, so then requests must have none.
    """
    for penalty, rows in _groups(r.params.repetition_penalty for r in requests):
        if penalty != 1:
            processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
            table = to_device(_id_table(requests, rows), torch.int64, scores.device)
            scores = _replace(scores, rows, partial(processor, table))
    amounts = [*_additive_penalties(requests), *_forbidden(requests, num_unread)]
    if amounts:
        places, subtracted = zip(*amounts, strict=True)
        row, token = to_device(torch.cat(places, 1), torch.int64, scores.device)
        change = to_device(torch.cat(subtracted), torch.float32, scores.device).neg()
        scores = scores.index_put((row, token), change, accumulate=True)
    return scores


def warp(requests: Sequence[Request], scores: torch.Tensor) -> torch.Tensor:
    """Apply temperature, `top_k`, `top_p` and `min_p`.

    Args:
        requests: of the rows, all with a temperature above 0.
        scores: float32 `[requests, vocabulary]`; stays as it is.
    """
    temperatures = [max(r.params.temperature, _MIN_TEMPERATURE) for r in requests]
    # The max becomes 0 and stays 0, so that tiny temperatures give no NaN.
    scores = scores - scores.amax(-1, keepdim=True)
    if any(temperature != 1 for temperature in temperatures):
        scores /= to_device(temperatures, torch.float32, scores.device)[:, None]
    cuts: tuple[tuple[Callable[[Request], Any], Any, Callable[[Any], Any]], ...] = (
        (lambda r: max(r.params.top_k, 0), 0, TopKLogitsWarper),
        (lambda r: r.params.top_p, 1, TopPLogitsWarper),
        (lambda r: r.params.min_p, 0, MinPLogitsWarper),
    )
    for parameter, off, warper in cuts:
        for value, rows in _groups(map(parameter, requests)):
            if value != off:
                cut = warper(value)
                scores = _replace(scores, rows, partial(_cut, cut))
    return scores


def _groups(values: Iterable[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Distinct values, each with its rows."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, value in enumerate(values):
        groups[value].append(row)
    yield from groups.items()


def _replace(
    scores: torch.Tensor, rows: list[int], function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if len(rows) == len(scores):
        return function(scores)
    index = to_device(rows, torch.int64, scores.device)
    return scores.index_copy(0, index, function(scores[index]))


def _cut(cut: Callable[[None, torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and len(x) == 1:
        # On a GPU, torch's cumsum sums a single row in another order than several rows.
        return cut(None, x.expand(2, -1))[:1]
    return cut(None, x)


def _id_table(requests: Sequence[Request], rows: Sequence[int]) -> torch.Tensor:
    """Distinct ids of prompt and output per row, padded with the first id, which has no effect."""
    ids = [_counts(requests[row]).ids for row in rows]
    longest = max(map(len, ids))
    return torch.stack([torch.cat([x, x[:1].expand(longest - len(x))]) for x in ids])


def _additive_penalties(
    requests: Sequence[Request],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Indices (row, token) `[2, n]`, and the penalties to subtract there `[n]`."""
    for row, request in enumerate(requests):
        frequency, presence = request.params.frequency_penalty, request.params.presence_penalty
        if frequency or presence:
            ids, counts = _counts(request).output
            yield _places(row, ids), frequency * counts.float() + presence


def _forbidden(
    requests: Sequence[Request], num_unread: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `_additive_penalties`: tokens that must not be generated yet."""
    for row, request in enumerate(requests):
        if request.stop_ids and len(request.output) + num_unread < request.params.min_tokens:
            ids = torch.tensor(sorted(request.stop_ids), device="cpu")
            yield _places(row, ids), torch.full((len(ids),), torch.inf, device="cpu")


def _places(row: int, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.full_like(ids, row), ids])


def _counts(request: Request) -> TokenCounts:
    assert request.counts is not None
    return request.counts
