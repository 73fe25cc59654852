"""Reads a checkpoint's folder as data: runs none of its code, and uses no network.

transformers may run code that `auto_map` names (and asks on standard input), follow an adapter to
another model, or download a kernel that `config.json` names as attention implementation. So the
model type is checked before transformers sees the folder, every `from_pretrained` of a folder gets
`LOCAL_FILES`, and implementations in the file are ignored.

A hub id is first resolved to its local snapshot, so that files beside the weights (KV scales,
`hf_quant_config.json`, tokenizer) are found as in a folder.
"""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig

from halfbyte.checkpoints.dialects.registry import read_config
from halfbyte.checkpoints.errors import CheckpointError, one_line
from halfbyte.models.architectures import UnsupportedModelError, check_model_type
from halfbyte.models.config_fields import check_fields

LOCAL_FILES: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of every `from_pretrained` that is given a folder."""

ADAPTER_FILE = "adapter_config.json"
_SNAPSHOT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def folder_of(model: nn.Module) -> Path | None:
    """Checkpoint folder of a model that transformers loaded; None if unknown.

    It is the path that was loaded, or a hub id's snapshot in the hub's cache.
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or ""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    commit = getattr(config, "_commit_hash", None)
    try:
        return Path(snapshot_download(name, revision=commit, local_files_only=True))
    except Exception:  # no hub id, or not cached: the type varies by client version
        return None


class ModelLoadError(CheckpointError):
    """A model could not be loaded; one line that names it and says why."""


def local_folder(
    path: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder of a checkpoint; a hub id is downloaded unless it is in the local cache.

    Args:
        path: folder or hub id.
        revision: of a hub id: a branch, tag or commit.
        cache_dir: the hub's cache; by default the client's.

    Raises:
        ModelLoadError: no such folder, or one without config.json; a hub id that cannot be fetched.
    """
    folder, text = Path(path), str(path)
    if os.path.isdir(folder):  # pathlib's raises for names that are too long
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{path}: the folder has no config.json")
        return folder
    if os.path.exists(folder):
        raise ModelLoadError(f"{path}: is a file, expected the folder of a checkpoint")
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"{path}: no such folder")
    what = f"{path}: no such folder; on the hub"
    return Path(
        or_load_error(
            what,
            snapshot_download,
            text,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=_SNAPSHOT_FILES,
        )
    )


def read_model_config(folder: Path) -> Any:
    """transformers' configuration of a supported model.

    Raises:
        ModelLoadError: no readable config.json, or an adapter's folder; one line.
        UnsupportedModelError: a model type that halfbyte is not tested with, even if transformers
            or code in the folder supports it.
    """
    check_is_data(folder)
    config = or_load_error(folder, AutoConfig.from_pretrained, folder, **LOCAL_FILES)
    # transformers would download kernels that these name; ours are set on use.
    config._attn_implementation = config._experts_implementation = None
    return config


def check_is_data(folder: Path) -> None:
    """See `read_model_config`; without reading the configuration itself."""
    # transformers' errors for a broken config do not name the fault.
    fields = or_load_error(folder, read_config, folder)
    or_load_error(folder, check_fields, folder / "config.json", fields)
    if (folder / ADAPTER_FILE).exists():
        raise ModelLoadError(
            f"{folder}: found {ADAPTER_FILE}, expected a whole model: merge the adapter into its "
            "base model first"
        )
    check_model_type(fields.get("model_type"))


def or_load_error(path: str | Path, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `load`; errors of libraries become ModelLoadError, in one line.

    For broken files, transformers, safetensors and huggingface_hub raise errors of many types, and
    tokenizers panics with an exception that is not an `Exception`.
    """
    try:
        return load(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UnsupportedModelError):
        raise
    except CheckpointError as error:  # names its file already
        raise ModelLoadError(str(error)) from error
    except BaseException as error:
        raise ModelLoadError(f"{path}: cannot be loaded: {one_line(error)}") from error
