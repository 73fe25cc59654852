"""Files that halfbyte keeps: the user's cache folder, and writing that is whole or not at all."""

import os
import tempfile
from pathlib import Path


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
