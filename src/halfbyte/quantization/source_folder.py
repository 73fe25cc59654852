"""The unquantized source checkpoint: checks, and the files to copy."""

from pathlib import Path
from typing import Any

from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE
from halfbyte.checkpoints.dialects.registry import read_config
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import INDEX_FILE
from halfbyte.checkpoints.output_folder import REPORT_FILE

_WEIGHT_FILES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
}
_REPLACED = {"config.json", INDEX_FILE, MODELOPT_FILE, REPORT_FILE}


def check_destination(folder: Path, destination: Path) -> None:
    """Raise CheckpointError if source or destination contains the other."""
    source, target = folder.resolve(), destination.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(
            f"{destination}: expected a folder apart from the source, found one inside the other"
        )


def read_unquantized_config(folder: Path) -> dict[str, Any]:
    """The fields of `config.json`.

    Raises:
        CheckpointError: a broken file, or the checkpoint is quantized already.
    """
    config = read_config(folder)
    section = config.get("quantization_config") or config.get("compression_config")
    if section or (folder / MODELOPT_FILE).is_file():
        method = section.get("quant_method") if isinstance(section, dict) else None
        is_gpt_oss = method == "mxfp4" and config.get("model_type") == "gpt_oss"
        raise CheckpointError(
            f"{folder}: expected an unquantized checkpoint, found one quantized by "
            f"{method or 'modelopt'}"
            + ("; leave the format out to keep its experts in MXFP4" if is_gpt_oss else "")
        )
    return config


def files_to_copy(folder: Path) -> list[Path]:
    """All files other than weights and declarations of a quantization.

    Raises:
        CheckpointError: an entry that is not a file.
    """
    files = []
    for file in sorted(folder.iterdir()):
        hidden = file.name.startswith(".")
        if hidden or file.is_dir() or file.suffix in _WEIGHT_FILES or file.name in _REPLACED:
            continue
        if not file.is_file():
            found = "something else" if file.exists() else "a link to nothing"
            raise CheckpointError(f"{file}: expected a file, found {found}")
        files.append(file)
    return files
