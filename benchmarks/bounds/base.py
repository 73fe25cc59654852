"""A bound on a figure of a committed run."""

import json
import operator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "results"
_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


class Bound(NamedTuple):
    """`value comparison limit` must hold."""

    run: str
    """File name in `results/`, without `.json`."""
    name: str
    value: float
    comparison: str
    """One of `<`, `<=`, `==`, `>=`, `>`."""
    limit: float
    known_miss: str = ""
    """Why the committed run misses the bound; if set, meeting the bound is an error."""

    @property
    def holds(self) -> bool:
        """Whether the value meets the limit; NaN never does."""
        return bool(_COMPARISONS[self.comparison](self.value, self.limit))


def result(run: str) -> dict[str, Any]:
    """A committed run."""
    report: dict[str, Any] = json.loads((RESULTS / f"{run}.json").read_text())
    return report
