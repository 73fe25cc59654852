"""Usage errors as one readable line, whatever the command line contains."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from halfbyte.files import shortened


class ShortUsageErrors(TyperGroup):
    """A group that shortens its own and its commands' usage errors, which repeat given values."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the group's own options."""
        with _shortened_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's options and run it."""
        with _shortened_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _shortened_usage_errors() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = shortened(error.message)  # type: ignore[attr-defined]
        raise


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""`UsageError`, the base of all errors of a command line, which typer does not export."""
