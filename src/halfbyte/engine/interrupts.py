"""Defer Ctrl-C until an update of several objects is complete."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT, and handle it on exit.

    Python runs signal handlers between any two bytecodes of the main thread; other threads are not
    interrupted. For short pure Python code only: Ctrl-C cannot stop a block of it that hangs.
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
