"""A prompt on its way through the engine."""

from dataclasses import dataclass, field
from enum import StrEnum

from halfbyte.engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's context is full."""
    ERROR = "error"
    """It could not be served; `error` says why."""


@dataclass(eq=False)
class Request:
    """State of one prompt; owned by the scheduler until it is finished.

    Args:
        id: number in order of arrival.
        prompt: token ids.
        params: how to sample and when to stop.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose K and V are in the cache."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finish_reason is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids `start` .. `stop - 1` of prompt and output."""
        return (self.prompt + self.output)[start:stop]

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End it."""
        self.finish_reason, self.error = reason, error


@dataclass(frozen=True)
class RequestOutput:
    """What a request came to.

    Args:
        prompt: the prompt's text, or None if it was given as token ids.
        prompt_token_ids: its ids.
        text: the generated text, stop strings cut off.
        token_ids: the generated ids.
        finish_reason: why it ended.
        error: what went wrong, where `finish_reason` is `error`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
