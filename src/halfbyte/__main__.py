"""The `halfbyte` command, also as `python -m halfbyte`."""

import os
import signal
from contextlib import suppress


def main() -> None:
    """Run the command line; see `halfbyte.cli`."""
    own = signal.getsignal(signal.SIGINT)
    # A shell's background job ignores SIGINT; and only the main thread can set handlers.
    with suppress(ValueError):
        if own is signal.default_int_handler:
            # Nothing has begun while modules are imported: exit at once, without a traceback.
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from halfbyte import cli

    with suppress(ValueError):
        signal.signal(signal.SIGINT, own)
    cli.main()


if __name__ == "__main__":
    main()
