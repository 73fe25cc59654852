"""Compiled CUDA kernels on disk, so that only a machine's first process waits for the compiler.

They lie in `files.cache_folder()`; if that is None, none are kept. A file's name is a hash of all
that the cubin was made from; in it are the SHA-256 of the rest, and the cubin. Where files can be
neither read nor written, kernels are compiled, and nothing else happens. Nothing is removed: a file
has some 50 kB. What lies there is run, so that only its user should be able to write to it.
"""

import logging
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from halfbyte.files import cache_folder, make_private, replace_file

logger = logging.getLogger("halfbyte")

_DIGEST_BYTES = sha256().digest_size


def cubin(name: str, made_from: Iterable[bytes], compiled: Callable[[], bytes]) -> bytes:
    """The cubin that `compiled` gives, from disk if it is there.

    Args:
        name: for the file's name.
        made_from: everything that the cubin depends on.
        compiled: compiles it; its errors pass through.
    """
    folder = cache_folder()
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


def _read(path: Path) -> bytes | None:
    """What was written there; None if there is nothing, or something else."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, made = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return made if digest == sha256(made).digest() else None


def _write(path: Path, made: bytes) -> None:
    try:
        make_private(path.parent)
        replace_file(path, sha256(made).digest() + made)
    except OSError as error:
        logger.debug("compiled kernels are not kept: %s", error)
