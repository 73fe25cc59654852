"""Results of requests."""

from dataclasses import dataclass

from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.engine.request import FinishReason, Request


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token at one position.

    Args:
        logprob: its log probability, from the model's unmodified logits.
        rank: 1 for the most likely token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: its number among the prompt's `SamplingParams.n`.
        text: the generated text without stop strings. Append it to the prompt's text unchanged.
        token_ids: the generated ids.
        finish_reason: why it ended.
        error: what went wrong, where `finish_reason` is `error`.
        logprobs: per generated token, those of the sampled and of the most likely tokens; None
            unless `SamplingParams.logprobs` is set.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """Result of one prompt.

    Args:
        prompt: the prompt's text, or None if it was given as token ids.
        prompt_token_ids: its ids.
        outputs: its completions, `SamplingParams.n` of them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first completion."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        """Of the first completion."""
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Of the first completion."""
        return self.outputs[0].logprobs


def completion_of(request: Request, index: int, text: Detokenizer | None) -> CompletionOutput:
    """The output of a finished request."""
    assert request.finish_reason is not None
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = [
            {
                token: Logprob(x, rank, text.token_text(token) if text else None)
                for token, x, rank in at
            }
            for at in request.logprobs
        ]
    return CompletionOutput(
        index=index,
        text=text.text if text else "",
        token_ids=request.output,
        finish_reason=request.finish_reason,
        error=request.error,
        logprobs=logprobs,
    )
