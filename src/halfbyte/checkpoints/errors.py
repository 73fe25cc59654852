"""`CheckpointError`: one-line errors for checkpoints."""

from pathlib import Path
from typing import Any

from halfbyte.files import read_json_object, shortened


class CheckpointError(ValueError):
    """A checkpoint is broken or not supported; one line: what, expected, found.

    Long messages are shortened in the middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def one_line(error: BaseException) -> str:
    """An error's message on one line; its class name if the message is empty."""
    text = shortened(str(error))
    if isinstance(error, KeyError) and " " not in text:
        text = f"unknown name {text}"
    return text or type(error).__name__


def read_json(file: Path) -> dict[str, Any]:
    """As `files.read_json_object`.

    Raises:
        CheckpointError: instead of its ValueError.
    """
    try:
        return read_json_object(file)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
