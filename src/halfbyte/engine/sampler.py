"""Samples tokens from logits: one pass for the whole batch, one transfer from the device.

The transfer need not be waited for at once: the next step can be launched with tokens that only the
device knows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.engine.logits import penalize, to_device, warp
from halfbyte.engine.noise import add_gumbel_noise, noise_keys
from halfbyte.engine.request import Request


@dataclass(frozen=True)
class Sampled:
    """A request's next token.

    Args:
        token: its id.
        error: why there is no token; None if there is one.
        logprobs: `(token, log probability, rank)` of it and of the most likely ones; None unless
            requested.
    """

    token: int
    error: str | None = None
    logprobs: tuple[tuple[int, float, int], ...] | None = None


class Sampler:
    """Samples all requests of a step.

    A request's token depends only on its logits, parameters, seed and position, not on the rest of
    the batch or on earlier steps. So a failed step needs no rollback here.
    """

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Sampled]:
        """The next token of every request; as `launch`, and waits for the tokens."""
        return self.launch(requests, logits).read()

    @torch.inference_mode()
    def launch(
        self, requests: Sequence[Request], logits: torch.Tensor, num_unread: int = 0
    ) -> "PendingTokens":
        """Begin to sample the next token of every request; does not wait for the device.

        Args:
            requests: of the rows of `logits`.
            logits: `[requests, vocabulary]`; may change once this has returned.
            num_unread: as of `penalize`.
        """
        if not requests:
            nothing = logits.new_empty(0)
            return PendingTokens(nothing.long(), Transfer(nothing), 0, [], [])
        unchanged = logits.float()
        scores = penalize(requests, unchanged, num_unread)
        tokens = _choose(requests, scores, num_unread)
        # amax returns NaN if there is one. Token ids are exact in float64.
        largest = logits.amax(-1)
        largest_allowed = largest if scores is unchanged else scores.amax(-1)
        columns = [x.double() for x in (tokens, largest, largest_allowed)]
        flat = torch.stack(columns, 1).flatten()
        asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        counts = [_count(request, logits.shape[-1]) for request in requests]
        if asking:
            rows = to_device(asking, torch.int64, logits.device)
            max_count = max(counts[i] for i in asking)
            top = _logprobs(logits[rows].float(), tokens[rows], max_count)
            flat = torch.cat((flat, top.flatten()))
        return PendingTokens(tokens, Transfer(flat), len(columns), asking, counts)


class Transfer:
    """An asynchronous copy of a tensor to the host.

    Args:
        values: on any device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(
                values.shape, dtype=values.dtype, device="cpu", pin_memory=True
            )
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def wait(self) -> torch.Tensor:
        """The values, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


@dataclass(frozen=True)
class PendingTokens:
    """Sampled tokens that the host does not know yet.

    Args:
        tokens: int64 `[requests]`, on the device; arbitrary valid ids for requests with an error.
        numbers: float64: `width` numbers per request for its `Sampled`, then log probabilities.
        width: see `numbers`.
        asking: rows whose requests want log probabilities.
        counts: how many of the most likely tokens each of them wants.
    """

    tokens: torch.Tensor
    numbers: Transfer
    width: int
    asking: Sequence[int]
    counts: Sequence[int]

    def read(self) -> list[Sampled]:
        """Wait for the tokens, or the errors of requests whose logits gave none (such as NaN)."""
        numbers = self.numbers.wait().tolist()
        end = self.width * len(self.counts)
        results = [
            _sampled(*numbers[start : start + self.width])
            for start in (self.width * i for i in range(len(self.counts)))
        ]
        if self.asking:
            _add_logprobs(results, numbers[end:], self.asking, self.counts)
        return results


def _sampled(token: float, largest: float, largest_allowed: float) -> Sampled:
    error = None
    if not math.isfinite(largest):
        error = f"the model's logits have {largest} for their largest"
    elif not math.isfinite(largest_allowed):
        error = "min_tokens: only tokens that end the text have finite logits; lower min_tokens"
    return Sampled(int(token), error)


def _choose(requests: Sequence[Request], scores: torch.Tensor, num_unread: int) -> torch.Tensor:
    """Tokens `[requests]`: drawn, or the most likely one at temperature 0."""
    drawing = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if len(drawing) == len(requests):  # a pass over all scores takes a percent of a step
        return _draw(requests, scores, num_unread)
    tokens = scores.argmax(-1)
    if not drawing:
        return tokens
    rows = to_device(drawing, torch.int64, scores.device)
    drawn = _draw([requests[i] for i in drawing], scores[rows], num_unread)
    return tokens.index_copy(0, rows, drawn)


def _draw(requests: Sequence[Request], scores: torch.Tensor, num_unread: int) -> torch.Tensor:
    """Tokens `[requests]`, by the Gumbel-max trick."""
    keys = [noise_keys(request.seed, len(request.output) + num_unread) for request in requests]
    # A new tensor: `warp` does not modify its input.
    scores = warp(requests, scores).contiguous()
    return add_gumbel_noise(scores, to_device(keys, torch.int32, scores.device)).argmax(-1)


def _count(request: Request, vocabulary: int) -> int:
    count = request.params.logprobs or 0
    return vocabulary if count < 0 else min(count, vocabulary)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """float64 `[rows, 2 + 2 count]`: log probability and rank of the token, then the ids and log
    probabilities of the `count` most likely tokens."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    rank = 1 + (logprobs > own).sum(1, keepdim=True)
    best = logprobs.topk(count)
    return torch.cat([x.double() for x in (own, rank, best.indices, best.values)], 1)


def _add_logprobs(
    results: list[Sampled], numbers: list[float], asking: Sequence[int], counts: Sequence[int]
) -> None:
    width = len(numbers) // len(asking)
    for i, start in zip(asking, range(0, len(numbers), width), strict=True):
        own, rank, *best = numbers[start : start + width]
        ids, values = best[: len(best) // 2], best[len(best) // 2 :]
        chosen = results[i]
        entries = [(chosen.token, own, int(rank))]
        entries += [
            (int(token), value, number)
            for number, (token, value) in enumerate(zip(ids, values, strict=True), 1)
            if number <= counts[i] and int(token) != chosen.token
        ]
        results[i] = Sampled(chosen.token, chosen.error, tuple(entries))
