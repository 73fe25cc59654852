"""Shared by all commands: quiet libraries, progress bars, one-line errors."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfbyte.files import shortened

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class _Chosen:
    verbose = False


def start() -> None:
    """Forget the options of an earlier command of this process."""
    _Chosen.verbose = False


def is_verbose() -> bool:
    """Whether the command has `--verbose`, which also shows where an error was raised."""
    return _Chosen.verbose


def choose_verbose(value: bool) -> bool:
    """Set `is_verbose`, as the option's callback."""
    _Chosen.verbose = value
    return value


def quiet_libraries(*, verbose: bool) -> None:
    """Silence other libraries' logs; halfbyte's own log goes to stderr."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    logger = logging.getLogger("halfbyte")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # On this logger only: a root handler would print every library's log.
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("halfbyte: %(message)s"))
        logger.addHandler(handler)


def stdin() -> TextIO:
    """Standard input; ValueError if it is closed."""
    if sys.stdin is None or sys.stdin.closed:  # None if the process was started without
        raise ValueError("standard input: expected text, but it is closed")
    return sys.stdin


@contextmanager
def progress_bar(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that draws a bar on a terminal and does nothing in a pipe."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_error(error: Exception) -> None:
    """Print an error on one line of stderr."""
    # As `checkpoints.errors.one_line`, whose import would load torch.
    message = shortened(str(error)) or type(error).__name__
    err.print("error:", style="bold red", end=" ")
    err.print(message, markup=False, emoji=False)
