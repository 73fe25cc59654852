"""`--each-value`: a small set of a test's parameter combinations in which every value occurs."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

Value = tuple[str, str]
"""A parametrization's names, and the values that they have together."""


def values_of(item: pytest.Item) -> set[Value]:
    """What an item's parameters are set to; names of one `parametrize` belong together."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return set()
    alone, values = dict(spec.params), set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [x.strip() for x in names.split(",")] if isinstance(names, str) else list(names)
        together = [repr(alone.pop(name)) for name in names if name in alone]
        values.add((",".join(names), ",".join(together)))
    return values | {(name, repr(value)) for name, value in alone.items()}


def smallest_cover(cases: Sequence[set[Value]]) -> list[int]:
    """Indices of cases that have every value of all cases: greedily, the first ones first."""
    missing, chosen = set[Value]().union(*cases), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        missing -= cases[best]
        chosen.append(best)
    return sorted(chosen) or list(range(len(cases)))


def leave_out_combinations(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the combinations that have no value of their own."""
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept = set[pytest.Item]()
    for group in groups.values():
        kept.update(group[i] for i in smallest_cover([values_of(item) for item in group]))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
