"""Time ratios of the linear benchmark."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
TIMINGS = ("single", "back_to_back", "in_graph")
"""All timings; see `benchmarks.timing`."""
OURS = ("cuda", "triton", "cpu")
"""halfbyte's own backends, fastest first; "our kernel" is the first that was measured."""
DENSE, READ = "dense_bf16", "plain_read"


def judged_by(on_gpu: bool) -> tuple[str, ...]:
    """The timings that bounds use; the first is shown in tables.

    On a GPU, the time within a graph of many calls: launching a graph of a single call takes up to
    half as long as the shortest call. Those times are in the report too.
    """
    return ("in_graph",) if on_gpu else ("back_to_back", "single")


def time_of(row: Row, name: str | None, timing: str) -> float | None:
    """A contender's time in µs; None if not measured."""
    time: float | None = row["contenders"].get(name, {}).get(timing)
    return time


def ours(row: Row) -> str | None:
    """The backend that counts as "our kernel"."""
    return next((name for name in OURS if time_of(row, name, "single")), None)


def ratios(row: Row, backends: Iterable[str]) -> Row:
    """For each timing the fastest backend, and time ratios; None if one is missing.

    Args:
        row: a case with `contenders`, `selected` and `selected_without_hint`.
        backends: names of the contenders with NVFP4 weights.
    """
    result: Row = {}
    for timing in TIMINGS:
        times = {name: time_of(row, name, timing) for name in backends}
        known = {name: time for name, time in times.items() if time}
        # A backend that cannot be captured has no graph time, but might be the fastest.
        complete = all(time or not time_of(row, name, "single") for name, time in times.items())
        fastest = min(known, key=lambda name: known[name]) if known and complete else None
        selected, own = time_of(row, row["selected"], timing), time_of(row, ours(row), timing)
        without = time_of(row, row["selected_without_hint"], timing)
        best, dense = time_of(row, fastest, timing), time_of(row, DENSE, timing)
        result[timing] = {
            "fastest": fastest,
            "selected_over_fastest": over(selected, best),
            "selected_without_hint_over_fastest": over(without, best),
            "selected_over_dense": over(selected, dense),
            "ours_over_humming": over(own, time_of(row, "humming", timing)),
            "ours_over_dense": over(own, dense),
            "ours_of_read": over(time_of(row, READ, timing), own),
        }
    return result


def over(numerator: float | None, denominator: float | None) -> float | None:
    """A ratio of times; None if one is missing."""
    return round(numerator / denominator, 4) if numerator and denominator else None
