"""Parameters that `make test` leaves out and `make test-all` runs."""

import pytest


def slow(*values: object) -> object:
    """Mark a set of parameters as slow: a faster one covers the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


CAPABILITIES = [80, 90, slow(100), slow(120)]
"""GPUs to compile for; sources differ little between SM90 and newer GPUs, which are slow."""
