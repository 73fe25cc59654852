"""Ctrl-C that waits until a change of several objects is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT back, and handle it at the end.

    Python runs signal handlers between any two instructions of the main thread; other threads are
    not interrupted. For short, pure Python work: what blocks in here cannot be stopped.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    arrived: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            before(*arrived[-1])
