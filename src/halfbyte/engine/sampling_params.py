"""How the next token is chosen and when to stop."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfbyte.layouts.arguments import finite_number, integer


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request, with the field's names and defaults.

    Args:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy; higher is more random.
        top_k: sample among the k most likely tokens; 0 or -1 for all.
        top_p: sample among the most likely tokens that together reach this probability.
        seed: makes a request's tokens repeatable, whatever else is in the batch.
        stop: text that ends generation and is cut off.
        stop_token_ids: further tokens that end generation, besides the model's own.
        ignore_eos: generate on past the model's end-of-sequence tokens.

    Raises:
        ValueError: a number out of its range, or what is none.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        if not all(isinstance(text, str) for text in stop):
            raise ValueError(f"stop: expected texts, got {self.stop!r}")
        kept = {
            "stop": stop,
            "stop_token_ids": tuple(
                integer("stop_token_ids", token)
                for token in _several("stop_token_ids", self.stop_token_ids)
            ),
            "max_tokens": integer("max_tokens", self.max_tokens),
            "temperature": finite_number("temperature", self.temperature, "a number >= 0"),
            "top_k": integer("top_k", self.top_k),
            "top_p": finite_number("top_p", self.top_p, "a number in (0, 1]"),
            "seed": None if self.seed is None else integer("seed", self.seed),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected a number in 0 .. 2^63 - 1, got {self.seed}")
        if self.top_k < -1:
            raise ValueError(f"top_k: expected at least 1, or 0 or -1 for all, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if "" in self.stop:
            raise ValueError("stop: an empty string would stop at once")


def _several(name: str, values: Any) -> tuple[Any, ...]:
    """What an array, a list or None has."""
    if values is not None and not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected a list, got {values!r}")
    return () if values is None else tuple(values)
