"""Bounds on linear layers, see `linear_layers.bounds`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.bounds.base import Bound
from benchmarks.linear_layers.bounds import bounds


def of_linear(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `linear.json`; the value is NaN if one side of a ratio is missing."""
    for found in bounds(report):
        for timing in report["judged_by"]:
            value = found[timing]["worst"]
            complete = found["holds"] is not None and value is not None
            name, comparison = found["meaning"].rsplit(" ", 2)[:2]
            yield Bound(
                "linear",
                f"{found['shape']}, {found['rows']}: {name}",
                value if complete else float("nan"),
                comparison,
                found["limit"],
            )
