"""Loading models: transformers' own loading, with clear errors."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from halfbyte.models.architectures import check_supported
from halfbyte.models.attention_functions import register


class ModelLoadError(ValueError):
    """A model could not be loaded; one line that names it and says why."""


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        path: folder of a checkpoint in Hugging Face's form, or the id of one on the hub.
        dtype: `auto` for the checkpoint's, or a torch dtype or its name.
        device: where to put it; by default a GPU if there is one, else the CPU.

    Returns:
        A transformers model in evaluation mode, ready for `halfbyte.Cache` and `halfbyte.LLM`.

    Raises:
        ModelLoadError: no such model, missing, truncated or mismatched files.
        UnsupportedModelError: an architecture that halfbyte is not tested with.
    """
    folder = _check_folder(path)
    config = _or_load_error(path, AutoConfig.from_pretrained, folder)
    check_supported(config)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, info = _or_load_error(
        path,
        AutoModelForCausalLM.from_pretrained,
        folder,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
    )
    problems = {kind: sorted(info.get(kind, ())) for kind in ("missing_keys", "mismatched_keys")}
    for kind, names in problems.items():
        if names:
            shown = ", ".join(str(name) for name in names[:3])
            raise ModelLoadError(f"{path}: {len(names)} {kind.replace('_', ' ')}: {shown}")
    register()
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        ModelLoadError: it has none, or it cannot be read.
    """
    return _or_load_error(path, AutoTokenizer.from_pretrained, _check_folder(path))


def _check_folder(path: str | Path) -> str:
    """The path as a string; a folder must look like a checkpoint, anything else like a hub id."""
    text = str(path)
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{path}: the folder has no config.json")
        return text
    if folder.exists():
        raise ModelLoadError(f"{path}: is a file, expected the folder of a checkpoint")
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"{path}: no such folder")
    return text


def _or_load_error(path: str | Path, load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except Exception as error:  # transformers and safetensors raise many kinds for broken files
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise ModelLoadError(f"{path}: cannot be loaded: {reason[:400]}") from error
