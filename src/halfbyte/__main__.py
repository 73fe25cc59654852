"""The `halfbyte` command, also as `python -m halfbyte`."""

import os
import signal
from contextlib import suppress


def main() -> None:
    """Run the command line; see `halfbyte.cli`."""
    # While modules are imported nothing has begun: an interrupt ends the process then and there.
    with suppress(ValueError):  # in another thread than the first, signals are not ours
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from halfbyte import cli

    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
