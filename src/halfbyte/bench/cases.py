"""Cases of the attention benchmark: head shapes, batches and context lengths."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

PRESETS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 8, "group": 4, "head_size": 128},
    "gpt-oss": {"kv_heads": 8, "group": 8, "head_size": 64, "block_size": 64, "sinks": True},
    "gemma": {"kv_heads": 1, "group": 4, "head_size": 256, "block_size": 64},
}
PRESETS["mistral"] = {**PRESETS["llama"], "sliding_window": 4096}
PRESETS["gpt-oss-sliding"] = {**PRESETS["gpt-oss"], "sliding_window": 128}
"""Fields of a case by model: heads, page size, sinks, window."""
_SPECULATIVE = {"gemma": 4}
"""Query tokens per sequence and decode step, by preset; 1 for the others."""


@dataclass(frozen=True)
class Case:
    """One measurement; its fields are the first of its row in a report.

    `decode` and `prefill`: the last `query_tokens` of every sequence attend to `context` cached
    tokens; `store` writes `context` tokens.
    """

    name: str
    kind: Literal["decode", "prefill", "store"]
    batch: int
    context: int
    query_tokens: int
    kv_heads: int
    group: int
    head_size: int
    block_size: int = 16
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
    name, queries = f"decode-{preset}-{batch}x{context}", min(_SPECULATIVE.get(preset, 1), context)
    return Case(name, "decode", batch, context, queries, **PRESETS[preset])


def prefill(preset: str, batch: int, new: int, cached: int = 0) -> Case:
    """Prefill of `new` tokens per sequence, after `cached` earlier ones."""
    name = f"prefill-{preset}-{batch}x{new}-on-{cached}"
    return Case(name, "prefill", batch, cached + new, new, **PRESETS[preset])


def store(preset: str, tokens: int) -> Case:
    """Writing `tokens` tokens to the cache."""
    case = Case(f"store-{preset}-{tokens}", "store", 1, tokens, tokens, **PRESETS[preset])
    return replace(case, sinks=False, sliding_window=None)
