"""Writes checkpoint folders atomically.

Everything is written into a hidden sibling of the destination, flushed to disk, and renamed in one
step. A killed process leaves the sibling `.NAME.incomplete-…` and no destination; an error removes
the sibling. The next run for the same destination removes what killed ones left: the sibling is
locked as long as its process lives.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from halfbyte.checkpoints.errors import CheckpointError, one_line
from halfbyte.checkpoints.index import INDEX_FILE, SINGLE_FILE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("halfbyte")

DEFAULT_SHARD_BYTES = 5_000_000_000
REPORT_FILE = "quantization_report.json"


@contextmanager
def new_folder(destination: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder to write into; renamed to `destination` if the block does not raise.

    Args:
        destination: of the finished folder; parents are created.
        replace: remove an existing checkpoint (or empty folder) at `destination` once the new
            folder is complete. Anything else is never removed.

    Raises:
        CheckpointError: `destination` exists and `replace` is not set or it is not a checkpoint, or
            a file operation in the block failed (disk full, no permission). The temporary folder
            is removed.
    """
    destination = Path(os.path.abspath(destination))
    _check_free(destination, replace)
    folder = destination.with_name(f".{destination.name}.incomplete-{secrets.token_hex(4)}")
    with ExitStack() as lock:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(destination)
            folder.mkdir()
            lock.callback(_unlock, _lock(folder))
            yield folder
            _sync(folder)
            _check_free(destination, replace)  # again: the block may have taken hours
            _move(folder, destination)
        except OSError as error:
            raise CheckpointError(f"{destination}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(destination: Path) -> None:
    """Remove what killed processes left beside a destination, and say so.

    Folders that a process still writes stay: it holds a lock on them. So does what was moved aside
    (`.old`): it may be all that is left of a destination.
    """
    if fcntl is None:
        return
    digits = "[0-9a-f]" * 8
    left = destination.parent.glob(f".{escape(destination.name)}.incomplete-{digits}")
    for folder in sorted(left):
        if folder.is_symlink() or not folder.is_dir() or (held := _lock(folder)) is None:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(held)
        logger.warning("%s: removed, an earlier run was killed while it wrote it", folder)


def _lock(folder: Path) -> int | None:
    """A descriptor with an exclusive lock on a folder; None if another process holds one."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def write_json(path: Path, fields: Any) -> None:
    """Write an object as indented JSON and flush it to disk."""
    with path.open("w") as file:
        file.write(json.dumps(fields, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file's bytes (following links) and flush them to disk."""
    shutil.copyfile(source, destination)
    _sync(destination)


class ShardWriter:
    """Writes tensors to `model.safetensors`, or to numbered shards with an index if they need more.

    Holds the tensors of one shard in memory.

    Args:
        folder: to write into.
        max_bytes: max size of a shard; a larger tensor gets its own shard.
        stored_module: a module's name in the files.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = DEFAULT_SHARD_BYTES,
        stored_module: Callable[[str], str] = lambda module: module,
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes: expected at least 1, got {max_bytes}")
        self.folder = folder
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self._stored_module = stored_module
        self._shards: list[list[str]] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor; the caller must not modify it afterwards."""
        module, dot, own = name.rpartition(".")
        name = f"{self._stored_module(module)}{dot}{own}"
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_bytes:
            self._write()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, rename the shards, and write the index."""
        if self._pending or not self._shards:
            self._write()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self.folder / SINGLE_FILE)
            return
        weight_map = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._path(i).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        fields = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        write_json(self.folder / INDEX_FILE, fields)

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}"

    def _write(self) -> None:
        path = self._path(len(self._shards))
        self._shards.append(list(self._pending))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # only the disk can fail here
            raise OSError(one_line(error)) from error
        # safetensors creates files that only the owner can read.
        path.chmod(self.folder.stat().st_mode & 0o666)
        _sync(path)
        self._pending, self._pending_bytes = {}, 0


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_free(destination: Path, replace: bool) -> None:
    """Raise CheckpointError if `destination` exists and must not be replaced."""
    if not os.path.lexists(destination):
        return
    if not replace:
        raise CheckpointError(f"{destination}: exists already (--force replaces it)")
    if destination.is_symlink() or not destination.is_dir():
        found = "a link" if destination.is_symlink() else "a file"
        raise CheckpointError(f"{destination}: expected a checkpoint to replace, found {found}")
    try:
        names = {path.name for path in destination.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be read: {one_line(error)}") from error
    has_weights = any(name.endswith(".safetensors") for name in names)
    if names and REPORT_FILE not in names and not ("config.json" in names and has_weights):
        raise CheckpointError(f"{destination}: expected a checkpoint to replace, found other files")


def _move(folder: Path, destination: Path) -> None:
    """Rename; an existing destination is moved aside first and removed only after the rename."""
    old = folder.with_name(f"{folder.name}.old")
    replaces = os.path.lexists(destination)
    if replaces:
        destination.rename(old)
    try:
        folder.rename(destination)
    except OSError:
        if replaces:
            old.rename(destination)
        raise
    _sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)
