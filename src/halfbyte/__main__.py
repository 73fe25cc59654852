"""The `halfbyte` command, also as `python -m halfbyte`."""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line; see `halfbyte.cli`."""
    _open_missing_streams()
    own = signal.getsignal(signal.SIGINT)
    # Leave SIGINT alone if a shell's background job ignores it. Only the main thread can set it.
    with suppress(ValueError):
        if own is signal.default_int_handler:
            # During imports: exit immediately, without a traceback.
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from halfbyte import cli

    with suppress(ValueError):
        signal.signal(signal.SIGINT, own)
    cli.main()


def _open_missing_streams() -> None:
    """Null devices for standard streams that are closed (`>&-` in a shell).

    Else the next file that is opened would get the stream's number, and what a library prints.
    `sys.stdin` stays None: commands that read it say so.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
