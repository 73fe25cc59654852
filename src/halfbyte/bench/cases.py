"""Cases of the attention benchmark: head shapes, batches and context lengths."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Kind = Literal["decode", "prefill", "store"]


class Heads(NamedTuple):
    """The model's part of a case."""

    kv_heads: int
    group: int
    head_size: int
    block_size: int = 16
    sinks: bool = False
    sliding_window: int | None = None
    query_tokens: int = 1
    """Query tokens per sequence and decode step: more than one for speculative decoding."""


PRESETS = {
    "llama": Heads(8, 4, 128),
    "gpt-oss": Heads(8, 8, 64, block_size=64, sinks=True),
    "gemma": Heads(1, 4, 256, block_size=64, query_tokens=4),
    "mistral": Heads(8, 4, 128, sliding_window=4096),
    "gpt-oss-sliding": Heads(8, 8, 64, block_size=64, sinks=True, sliding_window=128),
}


@dataclass(frozen=True)
class Case:
    """One measurement; its fields are the first of its row in a report.

    `decode` and `prefill`: the last `query_tokens` of every sequence attend to `context` cached
    tokens; `store` writes `context` tokens.
    """

    name: str
    kind: Kind
    batch: int
    context: int
    query_tokens: int
    kv_heads: int
    group: int
    head_size: int
    block_size: int
    sinks: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def window(self) -> int:
        """Tokens that a query token may attend to, itself included."""
        return self.sliding_window or self.context

    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, int32 `[batch]` on the CPU."""
        return torch.full((self.batch,), self.context, dtype=torch.int32, device="cpu")

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it attends to."""
        seen = range(self.context - self.query_tokens + 1, self.context + 1)
        return self.batch * sum(min(tokens, self.window) for tokens in seen)

    @property
    def tokens_read(self) -> int:
        """Cached tokens that at least one query token attends to."""
        return self.batch * min(self.context, self.window - 1 + self.query_tokens)


def decode(preset: str, batch: int, context: int) -> Case:
    """A decode step; ValueError for a batch or context below 1."""
    queries = min(PRESETS[preset].query_tokens, context)
    return _case(f"decode-{preset}-{batch}x{context}", "decode", preset, batch, context, queries)


def prefill(preset: str, batch: int, new: int, cached: int = 0) -> Case:
    """Prefill of `new` tokens per sequence, after `cached` earlier ones."""
    name = f"prefill-{preset}-{batch}x{new}-on-{cached}"
    return _case(name, "prefill", preset, batch, cached + new, new)


def store(preset: str, tokens: int) -> Case:
    """Writing `tokens` tokens to the cache."""
    return _case(f"store-{preset}-{tokens}", "store", preset, 1, tokens, tokens)


def _case(name: str, kind: Kind, preset: str, batch: int, context: int, queries: int) -> Case:
    heads, attends = PRESETS[preset], kind != "store"
    sinks, window = attends and heads.sinks, heads.sliding_window if attends else None
    return Case(name, kind, batch, context, queries, *heads[:4], sinks, window)


GPU_CASES = (
    *(decode("llama", *sizes) for sizes in ((64, 8192), (8, 32768), (1, 131072), (128, 1024))),
    *(decode(preset, 64, 8192) for preset in ("gpt-oss", "gemma", "mistral", "gpt-oss-sliding")),
    *(store("llama", tokens) for tokens in (8192, 64)),
    *(prefill("llama", 4, 2048, cached) for cached in (0, 32768)),
)
CPU_CASES = (
    *(decode("llama", *sizes) for sizes in ((1, 8192), (8, 2048))),
    *(decode(preset, 1, 4096) for preset in ("gpt-oss", "gemma", "gpt-oss-sliding")),
    store("llama", 256),
    *(prefill("llama", 1, 256, cached) for cached in (0, 2048)),
)
