"""Parameters that `make test` leaves out and `make test-all` runs."""

import pytest


def slow(*values: object) -> object:
    """A set of parameters whose path through the code another one takes, too, in less time."""
    return pytest.param(*values, marks=pytest.mark.slow)


CAPABILITIES = [80, 90, slow(100), slow(120)]
"""Of GPUs to compile for; between SM90 and the newer ones, sources differ little."""
