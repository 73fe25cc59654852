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
from halfbyte.files import check_checkpoint_name
from halfbyte.kvcache.scales import shape_of_model
from halfbyte.models.architectures import UnsupportedModelError, check_model_type
from halfbyte.models.config_fields import check_fields

LOCAL_FILES: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of every `from_pretrained` that is given a folder."""

_GIVE_SCALES = (
    "load it with halfbyte.load_model, which reads KV scales at once, or from an absolute path, or "
    "give kv_scales"
)
ADAPTER_FILE = "adapter_config.json"
_SNAPSHOT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


class ModelLoadError(CheckpointError):
    """A model could not be loaded; one line that names it and says why."""


def folder_of(model: nn.Module) -> Path | None:
    """Checkpoint folder of a model that transformers loaded; None if unknown.

    It is the path that was loaded, or a hub id's snapshot in the hub's cache. transformers keeps
    only the name that it was given, so a relative path is looked for in the folder that the process
    works in now.

    Raises:
        ModelLoadError: a folder that is not there any more, or holds another model's config.json.
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or ""
    if not name:
        return None
    folder = Path(name)
    if folder.is_dir():
        if not folder.is_absolute():
            _check_is_of(config, folder)
        return folder.absolute()
    commit = getattr(config, "_commit_hash", None)
    if commit is None and not _is_hub_id(name):
        raise ModelLoadError(
            f"{name}: expected the folder that the model was loaded from, found none in "
            f"{Path.cwd()}; {_GIVE_SCALES}"
        )
    try:
        return Path(snapshot_download(name, revision=commit, local_files_only=True))
    except Exception:  # not cached: the type varies by client version
        return None


def _is_hub_id(name: str) -> bool:
    """Whether this may be a hub id of a supported model; all of them have an owner."""
    return not name.startswith((".", "~", "/")) and name.count("/") == 1


def _check_is_of(config: Any, folder: Path) -> None:
    """Raise ModelLoadError if a folder's config.json describes another model."""
    found, expected = shape_of_model(read_config(folder)), shape_of_model(config)
    for name in expected:
        if name in found and found[name] != expected[name]:
            raise ModelLoadError(
                f"{folder.absolute()}: expected the folder that the model was loaded from, with "
                f"{name} {expected[name]}, found {found[name]}; {_GIVE_SCALES}"
            )


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
    try:
        check_checkpoint_name(path)
    except ValueError as error:
        raise ModelLoadError(str(error)) from None
    if os.path.isdir(path):
        return Path(path)
    what = f"{path}: no such folder; on the hub"
    return Path(
        or_load_error(
            what,
            snapshot_download,
            str(path),
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
    config.return_dict = True  # models read their own results by name
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
