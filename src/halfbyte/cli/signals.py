"""SIGTERM and Ctrl-C end a command with their own status, wherever they arrive.

A signal may arrive in a library's native code, which turns the handler's exception into an error of
its own, or drops it. So the status is kept.
"""

import atexit
import os
import signal
import sys
from contextlib import suppress
from types import FrameType


class _Received:
    status: int | None = None


def install() -> None:
    """Handle both signals; no effect outside the main thread."""
    _Received.status = None
    with suppress(ValueError):  # signals can be set in the main thread only
        signal.signal(signal.SIGTERM, _end)
        atexit.register(_ignore_ctrl_c)
        # A shell lets programs in the background ignore it.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


def status() -> int | None:
    """Exit status of the last signal received, 128 + its number; None if there was none."""
    return _Received.status


def end_at_once() -> None:
    """From now on Ctrl-C ends the process silently: the command has ended."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


def forget() -> None:
    """Clear `status`, for a command that handled Ctrl-C and continues."""
    _Received.status = None


def _ignore_ctrl_c() -> None:
    # Registered first, so called last: next Python removes its handlers, and Ctrl-C would kill a
    # process whose status is settled.
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    _Received.status = 128 + number
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(_Received.status)
