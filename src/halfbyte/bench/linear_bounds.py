"""What a run of the linear benchmark says: ratios of every case, and whether the bounds hold.

Everything here is arithmetic on the report, so that a committed run can be judged again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
TIMINGS = ("single", "back_to_back", "in_graph")
"""All that a run may have; see `timing`."""
OURS = ("cuda", "triton", "cpu")
"""Backends of our own, fastest first; "our kernel" is the first that was measured."""
DENSE, READ = "dense_bf16", "plain_read"
_HUMMING = {"6144x4096": 0.85, "28672x4096": 0.75, "4096x14336": 0.75}
"""Most of Humming's time that our kernel may take for few rows of x."""


class _Bound(NamedTuple):
    name: str
    meaning: str
    least_rows: int
    most_rows: int | None
    limit: Callable[[str], float | None]
    """Of a shape; None where there is no bound."""
    at_most: bool
    """Or at least."""
    on_cpus: bool = False
    """Whether it is for CPUs, too."""

    def includes(self, row: Row) -> bool:
        return row["m"] >= self.least_rows and (
            self.most_rows is None or row["m"] <= self.most_rows
        )

    def rows(self) -> str:
        if self.most_rows is None:
            return f"M >= {self.least_rows}" if self.least_rows > 1 else "every M"
        return f"M {self.least_rows} to {self.most_rows}"


_BOUNDS = (
    _Bound("ours_over_humming", "our kernel / Humming", 1, 16, _HUMMING.get, True),
    _Bound("ours_of_read", "plain read / our kernel", 1, 16, lambda _: 0.70, False),
    _Bound("selected_over_dense", "selected / dense bf16", 256, 4095, lambda _: 1.12, True),
    _Bound("selected_over_dense", "selected / dense bf16", 4096, None, lambda _: 1.05, True),
    _Bound(
        "selected_over_fastest", "selected / fastest", 1, None, lambda _: 1.10, True, on_cpus=True
    ),
)


def judged_by(on_gpu: bool) -> tuple[str, ...]:
    """The timings that bounds go by, the first of which is shown.

    On a GPU a layer's time in a graph among others. To start a graph of a single call takes the
    GPU up to half as long as the shortest of them; those times are in the report, too.
    """
    return ("in_graph",) if on_gpu else ("back_to_back", "single")


def time_of(row: Row, name: str | None, timing: str) -> float | None:
    """A subject's time in µs; None where it was not measured."""
    time: float | None = row["subjects"].get(name, {}).get(timing)
    return time


def ours(row: Row) -> str | None:
    """Which of our own backends counts as ours."""
    return next((name for name in OURS if time_of(row, name, "single")), None)


def ratios(row: Row, backends: Iterable[str]) -> Row:
    """For each timing the fastest backend, and ratios of times; None where one is missing.

    Args:
        row: a case with `subjects`, `selected` and `selected_without_hint`.
        backends: names of the subjects that multiply by NVFP4 weights.
    """
    result: Row = {}
    for timing in TIMINGS:
        times = {name: time_of(row, name, timing) for name in backends}
        known = {name: time for name, time in times.items() if time}
        # Who cannot be captured has no time in a graph, and might be the fastest.
        complete = all(time or not time_of(row, name, "single") for name, time in times.items())
        fastest = min(known, key=lambda name: known[name]) if known and complete else None
        selected, own = time_of(row, row["selected"], timing), time_of(row, ours(row), timing)
        without = time_of(row, row["selected_without_hint"], timing)
        best, dense = time_of(row, fastest, timing), time_of(row, DENSE, timing)
        result[timing] = {
            "fastest": fastest,
            "selected_over_fastest": _over(selected, best),
            "selected_without_hint_over_fastest": _over(without, best),
            "selected_over_dense": _over(selected, dense),
            "ours_over_humming": _over(own, time_of(row, "humming", timing)),
            "ours_over_dense": _over(own, dense),
            "ours_of_read": _over(time_of(row, READ, timing), own),
        }
    return result


def bounds(report: Row) -> list[Row]:
    """What must hold on an H200, bound by bound and shape by shape; on CPUs, of the choice alone.

    A bound holds if it does in every measured case that it speaks of, by the timings of the
    report's `judged_by`. Where a side of the ratio is missing in one of them, and no other breaks
    it, `holds` is None.

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
            kept = [v <= limit if bound.at_most else v >= limit for v in values if v is not None]
            yield {
                "name": bound.name,
                "meaning": f"{bound.meaning} {'<=' if bound.at_most else '>='} {limit:.2f}",
                "shape": shape,
                "rows": bound.rows(),
                "limit": limit,
                **worst,
                # One case beyond the bound is enough to break it, whatever else is missing.
                "holds": False if not all(kept) else True if complete else None,
            }


def _worst(bound: _Bound, rows: list[Row], timing: str) -> Row:
    known = [(row[timing][bound.name], row["m"]) for row in rows]
    known = [(value, m) for value, m in known if value is not None]
    if not known:
        return {"worst": None, "m": None}
    value, m = max(known) if bound.at_most else min(known)
    return {"worst": value, "m": m}


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return round(numerator / denominator, 4) if numerator and denominator else None
