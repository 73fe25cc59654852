"""Compiled CUDA kernels on disk, so that only a machine's first process waits for the compiler.

They lie in the folder that `HALFBYTE_CACHE_DIR` names, by default `halfbyte` in `XDG_CACHE_HOME`
or `~/.cache`. With `HALFBYTE_CACHE_DIR` set to nothing, none are kept. A file's name is a hash of
all that the cubin was made from; in it are the SHA-256 of the rest, and the cubin. Where files can
be neither read nor written, kernels are compiled, and nothing else happens. Nothing is removed: a
file has some 50 kB. What lies there is run, so that only its user should be able to write to it.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

logger = logging.getLogger("halfbyte")

_DIGEST_BYTES = sha256().digest_size


def cubin(name: str, made_from: Iterable[bytes], compiled: Callable[[], bytes]) -> bytes:
    """The cubin that `compiled` gives, from disk if it is there.

    Args:
        name: for the file's name.
        made_from: everything that the cubin depends on.
        compiled: compiles it; its errors pass through.
    """
    folder = _folder()
    if folder is None:
        return compiled()
    key = sha256()
    for part in made_from:
        key.update(len(part).to_bytes(8, "little") + part)
    path = folder / f"{name}-{key.hexdigest()[:32]}"
    found = _read(path)
    if found is not None:
        return found
    made = compiled()
    _write(path, made)
    return made


def _folder() -> Path | None:
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


def _read(path: Path) -> bytes | None:
    """What was written there; None if there is nothing, or something else."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, made = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return made if digest == sha256(made).digest() else None


def _write(path: Path, made: bytes) -> None:
    """Whole or not at all, whoever else writes or reads it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            (Path(folder) / path.name).write_bytes(sha256(made).digest() + made)
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        logger.debug("compiled kernels are not kept: %s", error)
