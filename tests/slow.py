"""Parameters that `make test` leaves out and `make test-all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

_ParameterSet = type(pytest.param())


def slow(*values: object) -> Any:
    """Mark a set of parameters as slow: a faster one covers the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of one kind, of which the first and every `count`-th after it are not slow.

    Args:
        count: more for cases that take longer.
        cases: values of one parameter, or tuples of several, some marked already.
    """
    marked = []
    for i, case in enumerate(cases):
        if i % count == 0:
            marked.append(case)
        elif isinstance(case, _ParameterSet):
            marks = [*case.marks, pytest.mark.slow]
            marked.append(pytest.param(*case.values, marks=marks, id=case.id))
        else:
            # A named tuple is one value.
            marked.append(slow(*case) if type(case) is tuple else slow(case))
    return marked


CAPABILITIES = [80, 90, slow(100), slow(120)]
"""GPUs to compile for; sources differ little between SM90 and newer GPUs, which are slow."""
