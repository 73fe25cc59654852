"""What sampling parameters do to logits, for all rows of a batch at once.

By transformers' own processors, where it has them. Those take one parameter for all rows: rows that
share one, which are mostly all, go through together. Nothing here waits for a GPU.
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
"""Below, float32 has none."""


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values on a device, without waiting for what it runs."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def penalize(requests: Sequence[Request], scores: torch.Tensor) -> torch.Tensor:
    """Apply penalties and `min_tokens`.

    Args:
        requests: of the rows.
        scores: float32 `[requests, vocabulary]`; stays as it is.
    """
    for penalty, rows in _groups(r.params.repetition_penalty for r in requests):
        if penalty != 1:
            processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
            table = to_device(_id_table(requests, rows), torch.int64, scores.device)
            scores = _replace(scores, rows, partial(processor, table))
    amounts = [*_additive_penalties(requests), *_forbidden(requests)]
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
    # The largest becomes 0 and stays it, so that no temperature, however small, makes NaN.
    scores = scores - scores.amax(-1, keepdim=True)
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
    """Distinct values, each with the rows that have it."""
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
        # torch's cumsum of a single row on a GPU takes another order than that of several.
        return cut(None, x.expand(2, -1))[:1]
    return cut(None, x)


def _id_table(requests: Sequence[Request], rows: Sequence[int]) -> torch.Tensor:
    """Distinct ids of prompt and output per row, filled up with the first: it changes nothing."""
    ids = [_counts(requests[row]).ids for row in rows]
    longest = max(map(len, ids))
    return torch.stack([torch.cat([x, x[:1].expand(longest - len(x))]) for x in ids])


def _additive_penalties(
    requests: Sequence[Request],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and tokens `[2, n]`, and what is subtracted there `[n]`."""
    for row, request in enumerate(requests):
        frequency, presence = request.params.frequency_penalty, request.params.presence_penalty
        if frequency or presence:
            ids, counts = _counts(request).output
            yield _places(row, ids), frequency * counts.float() + presence


def _forbidden(requests: Sequence[Request]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `_additive_penalties`: what must not be generated yet."""
    for row, request in enumerate(requests):
        if request.stop_ids and len(request.output) < request.params.min_tokens:
            ids = torch.tensor(sorted(request.stop_ids), device="cpu")
            yield _places(row, ids), torch.full((len(ids),), torch.inf, device="cpu")


def _places(row: int, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.full_like(ids, row), ids])


def _counts(request: Request) -> TokenCounts:
    assert request.counts is not None
    return request.counts
