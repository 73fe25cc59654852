"""What is measured: shapes of heads, batches and lengths, each case with a name of its own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Kind = Literal["decode", "prefill", "store"]
_SHORTEST = 64


@dataclass(frozen=True)
class HeadShape:
    """The part of a case that a model decides."""

    kv_heads: int
    group: int
    head_size: int
    block_size: int = 16
    sinks: bool = False
    query_tokens: int = 1
    """Query tokens per sequence of a decode step: more than one for speculative decoding."""
    sliding_window: int | None = None


PRESETS = {
    "llama": HeadShape(8, 4, 128),
    "gpt-oss": HeadShape(8, 8, 64, block_size=64, sinks=True),
    "gemma": HeadShape(1, 4, 256, block_size=64, query_tokens=4),
    "mistral": HeadShape(8, 4, 128, sliding_window=4096),
    "gpt-oss-sliding": HeadShape(8, 8, 64, block_size=64, sinks=True, sliding_window=128),
    # The first, with one thing changed each.
    "wide": HeadShape(8, 4, 256),
    "long-pages": HeadShape(8, 4, 128, block_size=64),
    "mqa": HeadShape(1, 32, 128),
    "speculative": HeadShape(8, 4, 128, query_tokens=4),
}


@dataclass(frozen=True)
class Case:
    """One piece of work; `dataclasses.asdict` of it begins its row in a report.

    `decode` and `prefill` attend with the last `query_tokens` of every sequence of `context` tokens
    in the cache (if `ragged`, of log-uniform lengths from `shortest` up to that); `store` writes
    `context` tokens of every sequence.
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
    ragged: bool = False
    shortest: int = _SHORTEST
    sliding_window: int | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def evened_out(self) -> "Case":
        """As many sequences, all of this case's mean length."""
        return replace(self, context=round(float(self.lengths().float().mean())), ragged=False)

    def lengths(self) -> torch.Tensor:
        """int32 `[batch]` on the host, the same in every run."""
        if not self.ragged:
            return torch.full((self.batch,), self.context, dtype=torch.int32, device="cpu")
        generator = torch.Generator().manual_seed(0)
        low = torch.log(torch.tensor(float(self.shortest), dtype=torch.float32, device="cpu"))
        span = torch.log(torch.tensor(float(self.context), dtype=torch.float32, device="cpu")) - low
        shares = torch.rand(self.batch, generator=generator, dtype=torch.float32, device="cpu")
        return torch.exp(low + span * shares).int()

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it attends to."""
        rows = torch.arange(self.query_tokens, device="cpu")
        seen = self.lengths().long()[:, None] - self.query_tokens + 1 + rows
        return int(self._in_window(seen, 1).sum())

    @property
    def tokens_read(self) -> int:
        """Of the cache: those that some query token attends to."""
        return int(self._in_window(self.lengths().long(), self.query_tokens).sum())

    def _in_window(self, tokens: torch.Tensor, queries: int) -> torch.Tensor:
        """How many of the last tokens so many query tokens, at their end, attend to."""
        if self.sliding_window is None:
            return tokens
        return tokens.clamp(max=self.sliding_window - 1 + queries)


def decode(
    preset: str, batch: int, context: int, *, ragged: bool = False, shortest: int = _SHORTEST
) -> Case:
    """A decode step.

    Args:
        ragged: lengths are log-uniform, from `shortest` to `context`.
        shortest: at least 1; `context` if that is less.
    """
    name = f"decode-{preset}-{batch}x{context}"
    if ragged:
        name += "-ragged" if shortest == _SHORTEST else f"-ragged-from-{shortest}"
    _check("shortest", shortest)
    case = _case(name, "decode", preset, batch, context, PRESETS[preset].query_tokens)
    return replace(case, ragged=ragged, shortest=min(shortest, context)) if ragged else case


def prefill(preset: str, batch: int, new: int, cached: int = 0) -> Case:
    """`new` tokens of every sequence on `cached` earlier ones."""
    name = f"prefill-{preset}-{batch}x{new}-on-{cached}"
    return _case(name, "prefill", preset, batch, cached + new, new)


def store(preset: str, tokens: int) -> Case:
    """Writing `tokens` tokens to the cache."""
    return _case(f"store-{preset}-{tokens}", "store", preset, 1, tokens, tokens)


def _check(what: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{what}: expected at least 1, got {number}")


def _case(
    name: str,
    kind: Kind,
    preset: str,
    batch: int,
    context: int,
    query_tokens: int,
) -> Case:
    _check("batch", batch)
    _check("context", context)
    shape = PRESETS[preset]
    return Case(
        name=name,
        kind=kind,
        batch=batch,
        context=context,
        query_tokens=min(query_tokens, context),
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_size=shape.head_size,
        block_size=shape.block_size,
        sinks=shape.sinks and kind != "store",
        sliding_window=None if kind == "store" else shape.sliding_window,
    )


GPU_CASES = (
    decode("llama", 64, 8192),
    decode("llama", 8, 32768),
    decode("llama", 1, 131072),
    decode("llama", 128, 1024),
    decode("gpt-oss", 64, 8192),
    decode("gemma", 64, 8192),
    decode("gemma", 256, 8192),  # as many bytes as the first
    decode("mistral", 64, 16384),
    decode("gpt-oss-sliding", 64, 8192),
    decode("llama", 64, 16384, ragged=True),
    decode("llama", 16, 32768, ragged=True),
    decode("llama", 256, 2048, ragged=True),
    # The longest sixteen times as long as the shortest.
    decode("llama", 64, 16384, ragged=True, shortest=1024),
    decode("llama", 16, 32768, ragged=True, shortest=2048),
    decode("llama", 256, 2048, ragged=True, shortest=128),
    decode("wide", 32, 8192),
    decode("long-pages", 64, 8192),
    decode("mqa", 64, 65536),
    decode("speculative", 64, 8192),
    store("llama", 8192),
    store("llama", 64),
    prefill("llama", 4, 2048),
    prefill("llama", 4, 2048, cached=32768),
    prefill("mistral", 1, 16384),
    prefill("gpt-oss-sliding", 4, 2048),
    prefill("gpt-oss", 4, 2048),
)
# Variants to compare with the first case, not with others.
WITHOUT_PEERS = frozenset(
    case.name
    for case in GPU_CASES
    if case.name.split("-")[1] in ("wide", "long", "mqa", "speculative")
)
CPU_CASES = (
    decode("llama", 1, 8192),
    decode("llama", 8, 2048),
    decode("gpt-oss", 1, 4096),
    decode("gemma", 1, 4096),
    decode("llama", 8, 4096, ragged=True),
    decode("gpt-oss-sliding", 1, 4096),
    store("llama", 256),
    prefill("llama", 1, 256),
    prefill("llama", 1, 256, cached=2048),
)


def grid(presets: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> list[Case]:
    """Decoding, prefill (of whole prompts) and storing, for every combination.

    Raises:
        ValueError: an unknown preset or a number below 1.
    """
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        raise ValueError(f"heads: unknown {unknown[0]!r}; expected one of {', '.join(PRESETS)}")
    points = [(p, b, c) for p in presets for b in batches for c in contexts]
    cases = [
        *(decode(*point) for point in points),
        *(prefill(*point) for point in points),
        *(store(preset, batch * context) for preset, batch, context in points),
    ]
    return list({case.name: case for case in cases}.values())


def select(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """The cases whose name a regular expression finds something in.

    Raises:
        ValueError: not a regular expression, or none is left.
    """
    try:
        chosen = [case for case in cases if re.search(pattern or "", case.name)]
    except re.error as error:
        raise ValueError(f"only: {pattern!r} is not a regular expression: {error}") from None
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ValueError(f"only: {pattern!r} matches none of {names}")
    return chosen
