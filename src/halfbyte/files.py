"""Reading JSON that others wrote; the user's cache folder; writing that is whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

_MAX_MESSAGE = 600
"""Characters of an error: files may hold values of any length where a name belongs."""


def shortened(text: str, length: int = _MAX_MESSAGE) -> str:
    """A text on one line, its middle left out where it is longer than `length` characters."""
    line = " ".join(str(text).split())
    half = (length - 3) // 2
    line = line if len(line) <= length else f"{line[:half]} … {line[-half:]}"
    # Also what is no character for a terminal: half a surrogate pair, an escape sequence.
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)


def read_json_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file that holds an object.

    Raises:
        ValueError: it is absent, no regular file, no UTF-8, no JSON (or nested too deep), or holds
            something else; one line that names it.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError(f"{path}: cannot be read: no regular file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected a JSON object, found {error.reason}") from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: expected a JSON object, found {reason}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return fields


def cache_folder() -> Path | None:
    """Where things are kept that can be had again: compiled kernels, calibrations.

    The folder that `HALFBYTE_CACHE_DIR` names, by default `halfbyte` in `XDG_CACHE_HOME` or
    `~/.cache`. It need not exist.

    Returns:
        None where nothing is to be kept: `HALFBYTE_CACHE_DIR` is set to nothing, or the user has no
        home.
    """
    named = os.environ.get("HALFBYTE_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if named is not None:
            return Path(named).expanduser() if named else None
        if not base.is_absolute():  # its specification has others ignored
            base = Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "halfbyte"


def make_private(folder: Path) -> None:
    """Make a folder that only its user can enter, and those above it; what exists stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whoever else writes or reads it.

    The content goes to a temporary file beside `path`, which takes its place when it is on the
    disk. A process that is killed leaves what was there before, and at worst a hidden folder.

    Raises:
        OSError: the folder is absent or cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
