"""Bounds on linear layers, computed from a report."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.linear_layers.ratios import TIMINGS, Row

_HUMMING = {"6144x4096": 0.85, "28672x4096": 0.75, "4096x14336": 0.75}
"""Max time relative to Humming, for up to 16 tokens."""


class _Bound(NamedTuple):
    name: str
    meaning: str
    min_tokens: int
    max_tokens: int | None
    limit: Callable[[str], float | None]
    """Limit for a shape; None for no bound."""
    is_max: bool
    """Whether the limit is a max (else a min)."""
    on_cpus: bool = False
    """Whether it also applies to CPUs."""

    def includes(self, row: Row) -> bool:
        return bool(self.min_tokens <= row["m"] <= (self.max_tokens or row["m"]))

    def rows(self) -> str:
        if self.max_tokens is None:
            return f"M >= {self.min_tokens}" if self.min_tokens > 1 else "every M"
        return f"M {self.min_tokens} to {self.max_tokens}"


_BOUNDS = (
    _Bound("ours_over_humming", "our kernel / Humming", 1, 16, _HUMMING.get, True),
    _Bound("ours_of_read", "plain read / our kernel", 1, 16, lambda _: 0.70, False),
    _Bound("selected_over_dense", "selected / dense bf16", 256, 4095, lambda _: 1.12, True),
    _Bound("selected_over_dense", "selected / dense bf16", 4096, None, lambda _: 1.05, True),
    _Bound(
        "selected_over_fastest", "selected / fastest", 1, None, lambda _: 1.10, True, on_cpus=True
    ),
)


def bounds(report: Row) -> list[Row]:
    """Bounds on an H200, per bound and shape; on CPUs only those on backend selection.

    A bound holds if all its measured cases meet it, by the timings in the report's `judged_by`. If
    a case lacks one side of the ratio, and no other case breaks the bound, `holds` is None.

    Returns:
        For each: `name`, `meaning`, `shape`, `rows`, `limit`; for each timing the `worst` ratio and
        its `m`; `holds`.
    """
    on_cpu = report["gpu"] is None
    return list(_bounds(report["microseconds"], report["judged_by"], on_cpu))


def _bounds(rows: list[Row], judges: Sequence[str], on_cpu: bool) -> Iterator[Row]:
    for bound in _BOUNDS:
        if on_cpu and not bound.on_cpus:
            continue
        for shape in dict.fromkeys(row["shape"] for row in rows):
            limit = bound.limit(shape)
            chosen = [row for row in rows if row["shape"] == shape and bound.includes(row)]
            if limit is None or not chosen:
                continue
            worst = {timing: _worst(bound, chosen, timing) for timing in TIMINGS}
            values = [worst[timing]["worst"] for timing in judges]
            complete = all(row[t][bound.name] is not None for row in chosen for t in judges)
            kept = [v <= limit if bound.is_max else v >= limit for v in values if v is not None]
            yield {
                "name": bound.name,
                "meaning": f"{bound.meaning} {'<=' if bound.is_max else '>='} {limit:.2f}",
                "shape": shape,
                "rows": bound.rows(),
                "limit": limit,
                **worst,
                # One case beyond the limit breaks the bound, even if others are missing.
                "holds": False if not all(kept) else True if complete else None,
            }


def _worst(bound: _Bound, rows: list[Row], timing: str) -> Row:
    known = [(row[timing][bound.name], row["m"]) for row in rows]
    known = [(value, m) for value, m in known if value is not None]
    if not known:
        return {"worst": None, "m": None}
    value, m = max(known) if bound.is_max else min(known)
    return {"worst": value, "m": m}
