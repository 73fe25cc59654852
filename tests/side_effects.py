"""Bounds and side effects of a fuzzed case: time and memory; what it writes, starts or fetches."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfbyte.models import tokenizer_trial

SECONDS = 20
GIB = 1 << 30
_OUTSIDE = (
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "os.system", "os.exec"),
    *("os.posix_spawn", "os.fork", "pty.spawn", "input"),
)


_TRIAL = [sys.executable, "-P", str(Path(tokenizer_trial.__file__))]
"""The one program that loading may start."""


class Watch:
    """Records Python's audit events while `is_on`; audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.allowed: tuple[str, ...] = ()
        """Starts of paths that may be written to."""
        self.hosts: tuple[str, ...] = ()
        """Hosts that may be connected to."""
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in _OUTSIDE and not self._may_connect(event, args):
            self.seen.append(f"{event} {args}"[:300])
        elif event == "subprocess.Popen" and list(args[1])[:3] != _TRIAL:
            self.seen.append(f"{event} {args[:2]}"[:300])
        elif _is_write(event, args):
            paths = args[:2] if event == "os.rename" else args[:1]
            if not all(map(self._may_write, paths)):
                self.seen.append(f"{event} {args}"[:300])

    def _may_connect(self, event: str, args: tuple[Any, ...]) -> bool:
        address = args[1] if event == "socket.connect" else args
        return event.startswith("socket.") and address[0] in self.hosts

    def _may_write(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):  # a file descriptor
            return True
        text = os.path.abspath(os.fsdecode(path))
        return text.startswith(self.allowed) or text == os.devnull or "__pycache__" in text


def _is_write(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        return bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event == "os.remove" and args[1] != -1:  # `shutil.rmtree`, whose own event has the path
        return False
    return event in ("os.remove", "os.rename", "os.mkdir", "os.symlink", "shutil.rmtree")


class TooSlow(BaseException):
    """A case exceeded its time limit."""


@contextmanager
def bounds(megabytes: int = 8192) -> Iterator[None]:
    """Limit a case's time, and make huge allocations fail."""

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (megabytes << 20), limits[1])
    )
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def peak() -> int:
    """The process's largest resident set since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
