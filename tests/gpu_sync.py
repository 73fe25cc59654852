"""Calls that must not wait for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make any PyTorch operation that syncs the GPU raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
