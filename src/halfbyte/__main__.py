"""The `halfbyte` command, also as `python -m halfbyte`."""

import os
import signal
from contextlib import suppress


def main() -> None:
    """Run the command line; see `halfbyte.cli`."""
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


if __name__ == "__main__":
    main()
