"""What all commands share: quiet libraries, progress on a terminal, one-line errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def quiet_libraries(*, verbose: bool) -> None:
    """Keep other libraries' chatter off the screen; halfbyte's own log goes to stderr."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    logger = logging.getLogger("halfbyte")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # On this logger alone: a root handler would repeat what every library says.
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("halfbyte: %(message)s"))
        logger.addHandler(handler)


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
    """One line on stderr that says what went wrong."""
    # As dialects.one_line, which would load torch to print an error.
    message = " ".join(str(error).split()) or type(error).__name__
    err.print("error:", style="bold red", end=" ")
    err.print(message, markup=False, emoji=False)
