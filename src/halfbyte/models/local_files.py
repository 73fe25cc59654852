"""A checkpoint's folder as data: reading it runs none of its code and asks no network.

transformers offers to run what `auto_map` names, and asks on standard input where it was not told;
it follows an adapter to another model; and an attention implementation in `config.json` may name a
kernel on the hub. So the model type is looked up before transformers sees the folder, every
`from_pretrained` of a folder gets `LOCAL_FILES`, and the file chooses no implementation.

A hub id is resolved to its local snapshot first, so that all that a checkpoint carries beside its
weights (KV scales, `hf_quant_config.json`, tokenizer) is found the same way as in a folder.
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
    """Where the checkpoint of a model that transformers loaded is; None if it is not known.

    That is the path that it was given, or the snapshot of a hub id in the hub's own cache.
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
    except Exception:  # no id, or not in the cache: of many kinds, by the version of the client
        return None


class ModelLoadError(CheckpointError):
    """A model could not be loaded; one line that names it and says why."""


def local_folder(
    path: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder of a checkpoint; a hub id is downloaded, or found in the local cache.

    Args:
        path: folder or hub id.
        revision: of a hub id: a branch, tag or commit.
        cache_dir: where the hub's files are kept; by default where its client keeps them.

    Raises:
        ModelLoadError: no such folder, or one without config.json; a hub id that cannot be had.
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
        UnsupportedModelError: a model type that halfbyte is not tested with, whether transformers
            or code in the folder knows it.
    """
    check_is_data(folder)
    config = or_load_error(folder, AutoConfig.from_pretrained, folder, **LOCAL_FILES)
    # Names of kernels, some of which transformers would download; ours are set when they are used.
    config._attn_implementation = config._experts_implementation = None
    return config


def check_is_data(folder: Path) -> None:
    """See `read_model_config`; without reading the configuration itself."""
    # What transformers says of a broken one does not tell what is broken.
    fields = or_load_error(folder, read_config, folder)
    or_load_error(folder, check_fields, folder / "config.json", fields)
    if (folder / ADAPTER_FILE).exists():
        raise ModelLoadError(
            f"{folder}: found {ADAPTER_FILE}, expected a whole model: merge the adapter into its "
            "base model first"
        )
    check_model_type(fields.get("model_type"))


def or_load_error(path: str | Path, load: Any, *args: Any, **kwargs: Any) -> Any:
    """What `load` returns; a library's error as ModelLoadError, in one line.

    The one place for it: broken files make transformers, safetensors and huggingface_hub raise
    errors of many kinds, and tokenizers panic, whose exception is none of `Exception`.
    """
    try:
        return load(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UnsupportedModelError):
        raise
    except CheckpointError as error:  # names its file already
        raise ModelLoadError(str(error)) from error
    except BaseException as error:
        raise ModelLoadError(f"{path}: cannot be loaded: {one_line(error)}") from error
