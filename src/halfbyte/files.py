"""Reading untrusted JSON and texts, the user's cache folder, and atomic writes."""

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

_MAX_MESSAGE = 600
"""Max characters of an error message: values from files can have any length."""
_MAX_STREAM = 64 << 20
"""Max bytes of a text from a pipe or device, some of which never end."""


def shortened(text: str, length: int = _MAX_MESSAGE) -> str:
    """A text on one line, with its middle omitted if it is longer than `length` characters."""
    line = " ".join(str(text).split())
    half = (length - 3) // 2
    line = line if len(line) <= length else f"{line[:half]} … {line[-half:]}"
    # Escape what a terminal cannot print: lone surrogates, escape sequences.
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)


def check_checkpoint_name(name: str | Path) -> None:
    """Raise ValueError for what is neither a checkpoint's folder nor may be a hub id; one line."""
    folder, text = Path(name), str(name)
    if os.path.isdir(folder):  # pathlib's raises for names that are too long
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name}: the folder has no config.json")
    elif os.path.exists(folder):
        raise ValueError(f"{name}: is a file, expected the folder of a checkpoint")
    elif folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ValueError(f"{name}: no such folder")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file is absent, not regular, not UTF-8, not JSON (or nested too deep), or
            holds something else; one line that names the file.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
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


def read_text(path: str | Path) -> str:
    """A user's UTF-8 text, newlines and all.

    A pipe is read until its writer closes it; without a writer it is empty. What is no regular file
    may have at most 64 MiB.

    Raises:
        ValueError: it cannot be read, is too long, or is no such text; one line.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            os.set_blocking(descriptor, True)
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = file.read(-1 if is_regular else _MAX_STREAM + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_STREAM and not is_regular:
        raise ValueError(f"{path}: cannot be read: more than {_MAX_STREAM >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text: {error}") from None


def cache_folder() -> Path | None:
    """Folder for reproducible files: compiled kernels, calibrations.

    The folder that `HALFBYTE_CACHE_DIR` names, by default `halfbyte` in `XDG_CACHE_HOME` or
    `~/.cache`. It need not exist.

    Returns:
        None for no cache: `HALFBYTE_CACHE_DIR` is empty, or the user has no home.
    """
    named = os.environ.get("HALFBYTE_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if named is not None:
            return Path(named).expanduser() if named else None
        if not base.is_absolute():  # the XDG specification ignores relative paths
            base = Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        return None
    return base / "halfbyte"


def make_private(folder: Path) -> None:
    """Create a folder, and its parents, that only the user can enter; existing ones stay unchanged.

    Raises:
        OSError: it cannot be created.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, safe against concurrent readers and writers.

    The content goes to a temporary file beside `path`, which replaces it once it is on disk. A
    killed process leaves the old file, and at worst a hidden folder.

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
