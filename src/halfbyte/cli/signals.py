"""SIGTERM and Ctrl-C end a command with their own status, wherever they arrive.

A signal may arrive while a library's native code runs, which replaces the handler's exception by
its own, or drops it (as torch does while it imports NumPy). So the exit status is kept, and the
exception is raised again every half second until the command handles it or ends.
"""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

_SECONDS = 0.5
"""Seconds until an exception that was dropped is raised again."""


class _Received:
    status: int | None = None
    error: BaseException | None = None
    """The exception that was raised last."""
    is_look: bool = False
    """Whether the next signal is sent by `_look_later`."""


def install() -> None:
    """Handle both signals; no effect outside the main thread."""
    forget()
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
    _Received.error = None
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


def forget() -> None:
    """Clear `status`, for a command that handled Ctrl-C and continues."""
    _Received.status = _Received.error = None


def _ignore_ctrl_c() -> None:
    # Registered first, so `atexit` calls it last. Python then resets its signal handlers: Ctrl-C
    # would kill the process and replace an exit status that is already decided.
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    if _Received.is_look:
        _Received.is_look = False
        if _Received.error is None:
            return
        if _is_handled(_Received.error):  # files are being removed, for example
            _look_later(number)
            return
    _Received.status = 128 + number
    is_ctrl_c = number == signal.SIGINT
    _Received.error = KeyboardInterrupt() if is_ctrl_c else SystemExit(_Received.status)
    _look_later(number)
    raise _Received.error


def _look_later(number: int) -> None:
    """Send the signal to the main thread after `_SECONDS`, so that `_end` runs there again."""

    def look() -> None:
        if _Received.error is not None:
            _Received.is_look = True
            if hasattr(signal, "pthread_kill"):  # also ends what the main thread waits for
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            else:
                signal.raise_signal(number)

    timer = threading.Timer(_SECONDS, look)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started, or Python is ending
        timer.start()


def _is_handled(error: BaseException) -> bool:
    """Whether the code that was interrupted handles an exception, or another that it led to."""
    chain = [sys.exc_info()[1]]
    while chain:
        handled = chain.pop()
        if handled is error:
            return True
        if handled is not None:
            chain += (handled.__cause__, handled.__context__)
    return False
