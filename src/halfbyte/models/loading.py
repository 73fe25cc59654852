"""Loading models: transformers' own loading, with clear errors.

A hub id is resolved to its local snapshot first, so that all that a checkpoint carries beside its
weights (KV scales, `hf_quant_config.json`, tokenizer) is found the same way as in a folder.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from halfbyte.models.architectures import check_supported
from halfbyte.models.attention_functions import register

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SNAPSHOT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Tensors that only quantized weights come with; loading without them would give wrong weights.
_QUANTIZED_WEIGHT = re.compile(
    r"\.(weight_(packed|\w*scale\w*)|input_(\w*_)?scale\w*|qweight|qzeros|scales|g_idx|\w+_blocks)$"
)


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
        ModelLoadError: no such model, missing, truncated or mismatched files, or quantized weights
            that nothing here can read.
        UnsupportedModelError: an architecture that halfbyte is not tested with.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = local_folder(path)
    config = _or_load_error(path, AutoConfig.from_pretrained, folder)
    check_supported(config)
    _adapt_quantization(path, folder, config)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, info = _or_load_error(
        path,
        AutoModelForCausalLM.from_pretrained,
        folder,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, in one line
    )
    _check_complete(path, info)
    register()
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        ModelLoadError: it has none, or it cannot be read.
    """
    tokenizer = _or_load_error(path, AutoTokenizer.from_pretrained, local_folder(path))
    # Without files transformers makes a tokenizer that turns every text into nothing.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ModelLoadError(f"{path}: has no tokenizer")
    return tokenizer


def local_folder(path: str | Path) -> Path:
    """The folder of a checkpoint; a hub id is downloaded, or found in the local cache.

    Raises:
        ModelLoadError: no such folder, or one without config.json; a hub id that cannot be had.
    """
    folder, text = Path(path), str(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{path}: the folder has no config.json")
        return folder
    if folder.exists():
        raise ModelLoadError(f"{path}: is a file, expected the folder of a checkpoint")
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"{path}: no such folder")
    return Path(_or_load_error(path, snapshot_download, text, allow_patterns=_SNAPSHOT_FILES))


def _adapt_quantization(path: str | Path, folder: Path, config: Any) -> None:
    """Keep what a checkpoint declares of its KV cache where transformers does not trip over it."""
    file = folder / "hf_quant_config.json"
    if file.is_file():
        declared = _or_load_error(path, lambda: json.loads(file.read_text())["quantization"])
        config.quantization = declared
    section = getattr(config, "quantization_config", None)
    if isinstance(section, dict) and not section.get("config_groups"):
        weights = section.get("quant_algo") or section.get("format") not in (None, "dense")
        if section.get("quant_method") == "compressed-tensors" and not weights:
            # Only the cache is quantized: no need for the package that unpacks weights.
            config.quantization = {"kv_cache_scheme": section.get("kv_cache_scheme")}
            del config.quantization_config


def _check_complete(path: str | Path, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ModelLoadError(f"{path}: {_some(missing)} missing")
    mismatched = [
        f"{name} (file {tuple(found)}, model {tuple(expected)})"
        for name, found, expected in sorted(info.get("mismatched_keys", ()))
    ]
    if mismatched:
        raise ModelLoadError(f"{path}: wrong shape: {_some(mismatched)}")
    quantized = [name for name in info.get("unexpected_keys", ()) if _QUANTIZED_WEIGHT.search(name)]
    if quantized:
        raise ModelLoadError(
            f"{path}: has quantized weights that cannot be read: {_some(sorted(quantized))}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"


def _or_load_error(path: str | Path, load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except Exception as error:  # transformers and safetensors raise many kinds for broken files
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise ModelLoadError(f"{path}: cannot be loaded: {reason[:400]}") from error
