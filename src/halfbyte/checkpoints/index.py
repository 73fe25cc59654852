"""Index of the tensors in a checkpoint's folder, from the headers of its safetensors files.

A folder holds `model.safetensors`, or shards that `model.safetensors.index.json` lists. Broken
files are detected here, before any weight is read: a missing shard, a tensor that is not where the
index says, a truncated file, pickled weights (which are never opened). Tensors are then read shard
by shard; a shard is unmapped before the next is opened, so that host memory holds at most one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from halfbyte.checkpoints.errors import CheckpointError, one_line, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_NAME_BYTES = 255
"""Max length of a file name on common file systems."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in a header.

    Args:
        dtype: safetensors' name: `U8`, `F8_E4M3`, `BF16`, `F32` …
        shape: of the tensor.
        file: that holds it.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class CheckpointIndex:
    """The tensors of a folder.

    Args:
        folder: of the checkpoint.
        tensors: by name.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._stored_names: Mapping[str, str] = {}
        """Names in the files, of tensors with another name here."""

    @classmethod
    def read(cls, folder: str | Path) -> "CheckpointIndex":
        """Read the headers of a folder's weights.

        A folder with `model.safetensors` and an index of other files is rejected as ambiguous;
        transformers would silently read the former.

        Raises:
            CheckpointError: no safetensors, both forms of them, or a broken index or file; one line
                with the file, what was expected and what was found.
        """
        folder = Path(folder)
        weight_map = _weight_map(folder)
        if weight_map is None:
            return cls(folder, _read_header(_single_file(folder)))
        tensors: dict[str, TensorEntry] = {}
        for file in sorted(set(weight_map.values())):
            for name, entry in _read_header(folder / file).items():
                if weight_map.get(name, file) == file:
                    tensors[name] = entry
        for name, file in weight_map.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{folder}: {name}: expected in {file}, as {INDEX_FILE} says, "
                    "found no such tensor there"
                )
        return cls(folder, tensors)

    @classmethod
    def read_files(cls, files: Sequence[str | Path]) -> "CheckpointIndex":
        """Read the headers of these files only, and ignore other files in their folder.

        Args:
            files: of one checkpoint. For a tensor in several files the last file wins, as in
                transformers.

        Raises:
            CheckpointError: a file is absent, broken or not a safetensors file; one line.
        """
        tensors: dict[str, TensorEntry] = {}
        for file in map(Path, files):
            if file.suffix != ".safetensors":
                raise CheckpointError(
                    f"{file.parent}: expected safetensors files, {_found_pickled(file.name)}"
                )
            if not file.is_file():
                raise CheckpointError(
                    f"{file.parent}: expected the shard {file.name}, found no such file"
                )
            tensors |= _read_header(file)
        return cls(Path(files[0]).parent, tensors)

    @classmethod
    def read_chosen(cls, files: Sequence[str | Path]) -> "CheckpointIndex":
        """Read the headers of the files that transformers chose.

        Files of an index as `read`; others (`model.safetensors`, even beside an index, or a
        variant's) as `read_files`.

        Raises:
            CheckpointError: as `read` and `read_files`; files of several folders; a tensor of which
                transformers would read another copy than the index says.
        """
        index = cls.read_files(files)
        outside = [file for file in map(Path, files) if file.parent != index.folder]
        if outside:
            raise CheckpointError(
                f"{index.folder}: expected the files of one folder, found {outside[0]}"
            )
        if not (index.folder / INDEX_FILE).is_file():
            return index
        if {Path(file).name for file in files} != set(read_weight_map(index.folder).values()):
            return index
        chosen = cls.read(index.folder)
        for name, entry in chosen.tensors.items():
            last = index.tensors[name].file
            if last != entry.file:
                raise CheckpointError(
                    f"{index.folder}: {name}: expected only in {entry.file.name}, as {INDEX_FILE} "
                    f"says, found one in {last.name}, too"
                )
        return chosen

    def renamed(self, names: Mapping[str, str]) -> "CheckpointIndex":
        """The same tensors with some renamed.

        Args:
            names: new names, by names in the files.
        """
        tensors = {names.get(name, name): entry for name, entry in self.tensors.items()}
        result = CheckpointIndex(self.folder, tensors)
        stored = {names.get(name, name): old for name, old in self._stored_names.items()}
        renamed = {new: self._stored_names.get(old, old) for old, new in names.items()}
        result._stored_names = stored | renamed
        return result

    def stored_module(self, module: str) -> str:
        """A module's name in the files; itself if it has no tensors there."""
        own = next(iter(self.names_of(module)), None)
        if own is None:
            return module
        name = f"{module}.{own}"
        return self._stored_names.get(name, name).removesuffix(f".{own}")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names_of(self, module: str) -> frozenset[str]:
        """Names of a module's own tensors, without the module's."""
        return self._by_module.get(module, frozenset())

    @cached_property
    def _by_module(self) -> dict[str, frozenset[str]]:
        names: dict[str, set[str]] = {}
        for name in self.tensors:
            module, _, own = name.rpartition(".")
            names.setdefault(module, set()).add(own)
        return {module: frozenset(own) for module, own in names.items()}

    def require(self, name: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> TensorEntry:
        """The entry of a required tensor.

        Args:
            name: of the tensor.
            dtypes: valid ones, by safetensors' names.
            shapes: valid ones.

        Raises:
            CheckpointError: it is absent, or has another dtype or shape.
        """
        entry = self.tensors.get(name)
        if entry is None or entry.dtype not in dtypes or entry.shape not in shapes:
            expected = f"{'/'.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
            found = "no such tensor" if entry is None else str(entry)
            raise CheckpointError(f"{self.folder}: {name}: expected {expected}, found {found}")
        return entry

    def stream(
        self, names: Collection[str], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors one by one, shard by shard, each copied to `device`.

        Args:
            names: of the tensors; each must be in the index.
            device: to copy them to.

        Raises:
            CheckpointError: a file cannot be read any more.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, in_file in sorted(by_file.items()):
            with _open(file) as tensors:
                for name in in_file:
                    yield name, _copy(tensors, self._stored_names.get(name, name), file, device)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Shard of each tensor by the folder's index; None if there is no index."""
    if not (folder / INDEX_FILE).is_file():
        return None
    weight_map = read_weight_map(folder)
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            count = sum(value == shard for value in weight_map.values())
            raise CheckpointError(
                f"{folder}: {INDEX_FILE}: expected the shard {shard} with {count} tensors "
                f"({next(name for name in weight_map if weight_map[name] == shard)}, …), "
                "found no such file"
            )
    if SINGLE_FILE not in shards and (folder / SINGLE_FILE).is_file():
        raise CheckpointError(
            f"{folder}: expected {SINGLE_FILE} or a {INDEX_FILE} of other files, found both"
        )
    return weight_map


def read_weight_map(folder: Path) -> dict[str, str]:
    """Shard of each tensor by the folder's index; shards may be absent.

    Raises:
        CheckpointError: a broken index, or one that names files outside the folder.
    """
    file = folder / INDEX_FILE
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = "an empty one" if weight_map == {} else type(weight_map).__name__
        raise CheckpointError(f"{file}: expected a JSON object with 'weight_map', found {found}")
    for shard in weight_map.values():
        if not (isinstance(shard, str) and _is_file_name(shard)):
            raise CheckpointError(
                f"{file}: expected names of safetensors files in the same folder, found {shard!r}"
            )
    return weight_map


def _is_file_name(shard: str) -> bool:
    """Whether a shard's name is a valid file name of a safetensors file."""
    is_short = len(shard.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
    is_name = shard.isprintable() and Path(shard).name == shard
    return is_short and is_name and shard.endswith(".safetensors")


def _single_file(folder: Path) -> Path:
    file = folder / SINGLE_FILE
    if file.is_file():
        return file
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    found = _found_pickled(pickled[0]) if pickled else "found neither"
    raise CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}")


def _found_pickled(file: str) -> str:
    return f"found pickled weights ({file}), which can run code"


def _read_header(file: Path) -> dict[str, TensorEntry]:
    with _open(file) as tensors:
        entries = {}
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            tensor = tensors.get_slice(name)
            entries[name] = TensorEntry(tensor.get_dtype(), tuple(tensor.get_shape()), file)
        return entries


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from None


def _copy(tensors: Any, name: str, file: Path, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor, also to the host: a mapped tensor would keep the whole shard mapped."""
    try:
        mapped: torch.Tensor = tensors.get_tensor(name)
    except SafetensorError as error:
        raise _broken(file, error) from None
    return mapped.to(device, copy=True)


def _broken(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: expected a whole safetensors file, found {_named(error)}")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
