"""Ratios of the times in a run of the linear benchmark."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
TIMINGS = ("single", "back_to_back", "in_graph")
"""All that a run may have; see `benchmarks.timing`."""
OURS = ("cuda", "triton", "cpu")
"""Backends of our own, fastest first; "our kernel" is the first that was measured."""
DENSE, READ = "dense_bf16", "plain_read"


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


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return round(numerator / denominator, 4) if numerator and denominator else None
