"""Cases of the committed run, including ragged batches and variants of one shape."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from halfbyte.bench import cases as usual

_SHORTEST = 64


@dataclass(frozen=True)
class Case(usual.Case):
    """A case whose lengths may be log-uniform, from `shortest` to `context` tokens."""

    ragged: bool = False
    shortest: int = _SHORTEST

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest < 1:
            raise ValueError(f"shortest: expected at least 1, got {self.shortest}")

    def lengths(self) -> torch.Tensor:
        """int32 `[batch]` on the CPU, the same in every run."""
        if not self.ragged:
            return super().lengths()
        generator = torch.Generator().manual_seed(0)
        low = torch.tensor(float(min(self.shortest, self.context))).log()
        span = torch.tensor(float(self.context)).log() - low
        return torch.exp(low + span * torch.rand(self.batch, generator=generator)).int()

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it attends to."""
        seen = self.lengths().long()[:, None] - self.query_tokens + 1
        return int((seen + torch.arange(self.query_tokens)).clamp(max=self.window).sum())

    @property
    def tokens_read(self) -> int:
        """Cached tokens that at least one query token attends to."""
        return int(self.lengths().long().clamp(max=self.window - 1 + self.query_tokens).sum())

    def evened_out(self) -> "Case":
        """The same number of sequences, all with this case's mean length."""
        return _case(self, context=round(float(self.lengths().float().mean())), ragged=False)


def of_row(row: dict[str, Any]) -> Case:
    """The case of a row, from its first fields."""
    return Case(**{field.name: row[field.name] for field in fields(Case) if field.name in row})


def _case(case: usual.Case, **changes: Any) -> Case:
    return Case(**{**asdict(case), **changes})


def decode(preset: str, batch: int, context: int, **changes: Any) -> Case:
    """A decode step."""
    return _case(usual.decode(preset, batch, context), **changes)


def ragged(preset: str, batch: int, context: int, shortest: int = _SHORTEST) -> Case:
    """A decode step of sequences of log-uniform lengths."""
    name = f"decode-{preset}-{batch}x{context}-ragged"
    name += "" if shortest == _SHORTEST else f"-from-{shortest}"
    return decode(preset, batch, context, name=name, ragged=True, shortest=min(shortest, context))


def variant(name: str, batch: int, context: int, **changes: Any) -> Case:
    """A decode step with the first head shape and one change."""
    return decode("llama", batch, context, name=f"decode-{name}-{batch}x{context}", **changes)


VARIANTS = (
    variant("wide", 32, 8192, head_size=256),
    variant("long-pages", 64, 8192, block_size=64),
    variant("mqa", 64, 65536, kv_heads=1, group=32),
    variant("speculative", 64, 8192, query_tokens=4),
)
WITHOUT_PEERS = frozenset(case.name for case in VARIANTS)
"""Compared with the first case, not with peers."""
CASES = (
    *(decode("llama", *sizes) for sizes in ((64, 8192), (8, 32768), (1, 131072), (128, 1024))),
    *(decode(preset, 64, 8192) for preset in ("gpt-oss", "gemma")),
    decode("gemma", 256, 8192),  # reads as many bytes as the first
    decode("mistral", 64, 16384),
    decode("gpt-oss-sliding", 64, 8192),
    *(ragged("llama", *sizes) for sizes in ((64, 16384), (16, 32768), (256, 2048))),
    # Lengths within a factor of 16.
    *(
        ragged("llama", *sizes)
        for sizes in ((64, 16384, 1024), (16, 32768, 2048), (256, 2048, 128))
    ),
    *VARIANTS,
    *(_case(usual.store("llama", tokens)) for tokens in (8192, 64)),
    *(_case(usual.prefill("llama", 4, 2048, cached)) for cached in (0, 32768)),
    _case(usual.prefill("mistral", 1, 16384)),
    *(_case(usual.prefill(preset, 4, 2048)) for preset in ("gpt-oss-sliding", "gpt-oss")),
)
