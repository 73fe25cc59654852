"""How the next token is chosen and when to stop."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from halfbyte.layouts.arguments import finite_number, integer

_ONLY_IN_VLLM = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "guided_decoding",
        "include_stop_str_in_output",
        "logit_bias",
        "logits_processors",
        "logprob_token_ids",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
        "truncate_prompt_tokens",
        "watermarking",
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request, with vLLM's names, defaults and meanings.

    Logits are changed in this order: repetition, frequency and presence penalty, `min_tokens`,
    temperature, `top_k`, `top_p`, `min_p`.

    Args:
        max_tokens: max tokens to generate; None for the rest of the context.
        temperature: 0 is greedy; higher is more random.
        top_k: sample among the k most likely tokens; 0 or -1 for all.
        top_p: sample among the most likely tokens that together reach this probability.
        seed: makes a request's tokens repeatable, in any batch.
        stop: strings that end generation and are cut off; may contain special tokens.
        stop_token_ids: further tokens that end generation, besides the model's own.
        ignore_eos: continue past the model's end-of-sequence tokens.
        n: completions of the prompt; the i-th samples with `seed + i`.
        min_p: sample among tokens with at least this share of the most likely one's probability.
        repetition_penalty: above 1, tokens of prompt and output become less likely: positive logits
            are divided by it, negative ones multiplied (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that the output has.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        min_tokens: tokens before which no end-of-sequence or stop token is generated, and stop
            strings are ignored.
        logprobs: return the log probabilities (from the model's unmodified logits) of this many
            most likely tokens and of the sampled one; -1 for the whole vocabulary.

    Raises:
        ValueError: a value out of range, or not a number; a parameter that only vLLM supports.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Raise for a field that only vLLM has; the dataclass raises for unknown ones."""
        for name in fields:
            if name in _ONLY_IN_VLLM:
                raise ValueError(f"{name}: not supported by halfbyte.LLM; vLLM supports it")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        if not all(isinstance(text, str) for text in stop):
            raise ValueError(f"stop: expected texts, got {self.stop!r}")
        kept = {
            "stop": stop,
            "stop_token_ids": tuple(
                integer("stop_token_ids", token)
                for token in _as_tuple("stop_token_ids", self.stop_token_ids)
            ),
            "max_tokens": _optional("max_tokens", self.max_tokens),
            "temperature": finite_number("temperature", self.temperature, "a number >= 0"),
            "top_k": integer("top_k", self.top_k),
            "top_p": finite_number("top_p", self.top_p, "a number in (0, 1]"),
            "seed": _optional("seed", self.seed),
            "n": integer("n", self.n),
            "min_p": finite_number("min_p", self.min_p, "a number in [0, 1]"),
            "repetition_penalty": finite_number(
                "repetition_penalty", self.repetition_penalty, "a number > 0"
            ),
            "presence_penalty": finite_number("presence_penalty", self.presence_penalty),
            "frequency_penalty": finite_number("frequency_penalty", self.frequency_penalty),
            "min_tokens": integer("min_tokens", self.min_tokens),
            "logprobs": _optional("logprobs", self.logprobs),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if "" in self.stop:
            raise ValueError("stop: an empty string would stop at once")
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name, good, expected in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("temperature", self.temperature >= 0, "a number >= 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "a number in 0 .. 2^63 - 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("n", self.n >= 1, "at least 1"),
            ("n", self.n == 1 or self.temperature > 0, "1 where temperature is 0"),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number > 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "a number in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "a number in [-2, 2]"),
            ("min_tokens", self.min_tokens >= 0, "a number >= 0"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"at most max_tokens ({self.max_tokens})",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "a number >= 0, or -1"),
        ):
            if not good:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _optional(name: str, x: int | None) -> int | None:
    return None if x is None else integer(name, x)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The items of an array, a list or None."""
    if values is not None and not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected a list, got {values!r}")
    return () if values is None else tuple(values)
