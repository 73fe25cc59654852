"""State of a request in the engine."""

from dataclasses import dataclass, field
from enum import StrEnum

from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.engine.token_counts import TokenCounts

TokenLogprobs = tuple[tuple[int, float, int], ...]
"""Token, log probability and rank: of the sampled token, then of the most likely ones."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's context is full."""
    ERROR = "error"
    """It failed; `error` says why."""


@dataclass(eq=False)
class Request:
    """State of one prompt; owned by the scheduler until it is finished.

    Args:
        id: number in order of arrival.
        prompt: token ids.
        params: how to sample and when to stop.
        seed: for sampling.
        stop_ids: tokens that end it.
        max_tokens: max tokens to generate.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of each output token, if requested."""
    num_computed: int = 0
    """Tokens whose K and V are in the cache."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    counts: TokenCounts | None = field(default=None, init=False)
    """Token counts for penalties."""

    def __post_init__(self) -> None:
        if self.params.has_penalties:
            self.counts = TokenCounts(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def is_finished(self) -> bool:
        """Whether it has finished, with or without an error."""
        return self.finish_reason is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids `start` .. `stop - 1` of prompt and output."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - split) : max(0, stop - split)]

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Add a token to the output; finishes the request if that ends it."""
        self.output.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.counts is not None:
            self.counts.add(token)
        if token in self.stop_ids:
            self.finish(FinishReason.STOP)
        elif len(self.output) >= self.max_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish it."""
        self.finish_reason, self.error = reason, error
