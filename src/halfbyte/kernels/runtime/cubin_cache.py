"""On-disk cache of compiled CUDA kernels: only a machine's first process compiles.

Files are in `files.cache_folder()`; if that is None, nothing is cached. The file name has a hash of
everything that the cubin is made from; the content is the cubin after its SHA-256. If files cannot
be read or written, kernels are just compiled. Nothing is ever removed: a file has about 50 kB. The
content is executed, so only its user may have write access.
"""

import logging
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from halfbyte.files import cache_folder, make_private, replace_file

logger = logging.getLogger("halfbyte")

_DIGEST_BYTES = sha256().digest_size


def cubin(name: str, made_from: Iterable[bytes], compiled: Callable[[], bytes]) -> bytes:
    """The cubin from the cache, or compiled and then cached.

    Args:
        name: prefix of the file name.
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
    """The cached cubin; None if missing or corrupt."""
    try:
        if not path.is_file():  # reading a pipe would block
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
