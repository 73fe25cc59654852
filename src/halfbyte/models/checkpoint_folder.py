"""A checkpoint's metadata: read once, and kept with the model that was loaded from it.

The folder's path, the index and declarations of its files, and its KV scales (among the tensors,
and in `kv_scales.json`) are read before any weight. They stay valid if the folder is changed, moved
or deleted later, or if the process changes its working directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE, read_modelopt_file
from halfbyte.checkpoints.dialects.registry import read_declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.fingerprint import fingerprint
from halfbyte.checkpoints.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex, read_weight_map
from halfbyte.checkpoints.stored_kv_scales import StoredKVScales, read_stored_scales
from halfbyte.checkpoints.validate import QUANTIZED_WEIGHT
from halfbyte.kvcache import KVScales
from halfbyte.layouts.kv_cache_dtype import declared_cache_of
from halfbyte.layouts.kv_declarations import read_declared_cache
from halfbyte.models.architectures import check_supported
from halfbyte.models.config_fields import check_sizes
from halfbyte.models.file_names import named_as_modules
from halfbyte.models.local_files import local_folder, read_model_config

_ATTRIBUTE = "_halfbyte_checkpoint"


@dataclass(frozen=True)
class CheckpointKVScales:
    """The KV scales in a checkpoint's folder.

    Args:
        stored: among the tensors.
        declaring: source of the declared formats: ModelOpt's file, else the config.
        folder: absolute.
        file: of `kv_scales.json`; the error if it is broken, raised when its scales are needed;
            None if there is no such file.
        identity: fingerprint of the checkpoint; None if it was not computed, or cannot be.
    """

    stored: StoredKVScales
    declaring: Any
    folder: Path
    file: KVScales | CheckpointError | None = None
    identity: str | None = None

    @classmethod
    def read(cls, folder: Path, config: Any, *, identify: bool = False) -> "CheckpointKVScales":
        """Read a folder's.

        Args:
            folder: of a checkpoint.
            config: transformers config, or the dict of its `config.json`.
            identify: compute the fingerprint, to recognize the checkpoint later.

        Raises:
            CheckpointError: as `read_stored_scales`; a broken declaration.
        """
        folder = folder.absolute()
        return cls(
            read_stored_scales(folder),
            declaring(folder, config),
            folder,
            _read_file(folder),
            _identity(folder) if identify else None,
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether the folder still holds the checkpoint that was read from it."""
        return self.identity is not None and _identity(self.folder) == self.identity


@dataclass(frozen=True)
class Checkpoint:
    """Metadata of a checkpoint, see above.

    Args:
        folder: absolute.
        config: transformers config of a supported model.
        declaration: of quantized weights or a quantized cache; None for neither, or for a method
            that transformers loads.
        index: of the files.
        kv_scales: in the folder.
    """

    folder: Path
    config: Any
    declaration: Declaration | None
    index: CheckpointIndex
    kv_scales: CheckpointKVScales

    @classmethod
    def read(cls, path: str | Path) -> "Checkpoint":
        """Read everything but the weights of a folder or hub id.

        Raises:
            ModelLoadError, CheckpointError: broken or contradictory files.
            UnsupportedModelError: an architecture that halfbyte is not tested with.
        """
        folder = local_folder(path).absolute()
        config = read_model_config(folder)
        check_supported(config)
        section = getattr(config, "quantization_config", None)
        declaration = read_declaration(folder, {"quantization_config": section})
        if declaration is not None and declaration.quantizes_weights:
            index = CheckpointIndex.read(folder)
        else:
            index = _index_as_transformers(folder)
        if (section is None) if declaration is None else not declaration.quantizes_weights:
            _refuse_undeclared(index)
        index = named_as_modules(index, config.model_type)
        check_sizes(config, index)
        scales = CheckpointKVScales.read(folder, config, identify=True)
        return cls(folder, config, declaration, index, scales)

    @property
    def weight_declaration(self) -> Declaration | None:
        """The declaration if it quantizes weights; else None."""
        declared = self.declaration
        return declared if declared is not None and declared.quantizes_weights else None

    def attach_to(self, model: nn.Module) -> None:
        """Attach to a model, for `checkpoint_of`."""
        setattr(model, _ATTRIBUTE, self)


def checkpoint_of(model: nn.Module) -> Checkpoint | None:
    """The checkpoint of a model that halfbyte loaded, or its quantizer in `from_pretrained`; else
    None."""
    return getattr(model, _ATTRIBUTE, None)


def declaring(folder: Path, config: Any) -> Any:
    """Source of the cache's declared format: ModelOpt's file, else the config.

    Raises:
        ValueError: a format that halfbyte does not have; a broken file, or one that contradicts
            the section of compressed-tensors.
    """
    file = folder / MODELOPT_FILE
    if not file.is_file():
        return config
    section = read_modelopt_file(file)
    declared = read_declared_cache(section)
    if declared is None:
        return config
    if _method(config) != CompressedTensors.name:
        return section
    if declared_cache_of(config) != declared:
        raise CheckpointError(
            f"{file}: expected the KV cache that config.json declares, found another one"
        )
    return config


def _method(config: Any) -> object:
    """`quant_method` of a config, or of the dict of its file."""
    fields = config if isinstance(config, Mapping) else vars(config)
    section = fields.get("quantization_config")
    if isinstance(section, Mapping):
        return section.get("quant_method")
    return getattr(section, "quant_method", None)


def _read_file(folder: Path) -> KVScales | CheckpointError | None:
    try:
        return KVScales.load(folder)
    except ValueError as error:
        return CheckpointError(str(error))


def _identity(folder: Path) -> str | None:
    try:
        return fingerprint(folder)
    except CheckpointError:
        return None


def _index_as_transformers(folder: Path) -> CheckpointIndex:
    """Index of the files that transformers would read: it prefers a single file to an index, and
    searches all shards for a tensor, whatever the index says."""
    single = folder / SINGLE_FILE
    if single.is_file():
        return CheckpointIndex.read_files([single])
    if (folder / INDEX_FILE).is_file():
        shards = sorted(set(read_weight_map(folder).values()))
        return CheckpointIndex.read_files([folder / shard for shard in shards])
    return CheckpointIndex.read(folder)


def _refuse_undeclared(index: CheckpointIndex) -> None:
    """Raise CheckpointError if files hold quantized weights that are not declared."""
    name = next((name for name in index.tensors if QUANTIZED_WEIGHT.search(name)), None)
    if name is not None:
        raise CheckpointError(
            f"{index.folder}: found quantized weights (tensor {name}), expected a declaration in "
            "config.json or hf_quant_config.json"
        )
