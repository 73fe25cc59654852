"""Loading models: transformers' own loading, with clear errors; NVFP4 checkpoints our own way.

A hub id is resolved to its local snapshot first, so that all that a checkpoint carries beside its
weights (KV scales, `hf_quant_config.json`, tokenizer) is found the same way as in a folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from halfbyte.checkpoints.dialects.base import Declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.models.attention_functions import register
from halfbyte.models.checkpoint_folder import Checkpoint
from halfbyte.models.foreign_cache import without_cache
from halfbyte.models.local_files import LOCAL_FILES, ModelLoadError, check_is_data, or_load_error
from halfbyte.models.meta_model import check_bytes, empty_model, load_streamed, resolve_dtype
from halfbyte.models.nvfp4.layers import LayerOptions
from halfbyte.models.nvfp4.weight_stream import QUANTIZED_WEIGHT
from halfbyte.models.tokenizer import check_tokenizer, check_tokenizer_files

DTYPES = ("auto", "float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SNAPSHOT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str | None = None,
    linear_backend: str | None = None,
    quantize_activations: bool | None = None,
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Checkpoints with NVFP4 weights, ModelOpt's or compressed-tensors', are streamed from their
    shards to the device; their headers are compared with the model first.

    Args:
        path: folder of a checkpoint in Hugging Face's form, or the id of one on the hub.
        dtype: `auto` for the checkpoint's, or a torch dtype or its name.
        device: where to put it; by default a GPU if there is one, else the CPU.
        linear_backend: name of a backend of `halfbyte.linear` for NVFP4 layers; by default that of
            the environment variable `HALFBYTE_NVFP4_GEMM_BACKEND`, else the best for each layer.
        quantize_activations: whether layers that are stored as W4A4 quantize their activations
            (emulated where the machine has no FP4 arithmetic). By default only where a backend
            multiplies FP4 by FP4 natively; elsewhere they run as W4A16, and the log says so.
        batch_invariant: NVFP4 layers give a row the same bits whatever else is in the batch.

    Returns:
        A transformers model in evaluation mode, ready for `halfbyte.Cache` and `halfbyte.LLM`.

    Raises:
        ModelLoadError: no such model, or missing, truncated or mismatched files.
        CheckpointError: of a quantized checkpoint, a scheme that is not read here, or a tensor
            that is absent or does not fit; one line.
        UnsupportedModelError: an architecture that halfbyte is not tested with.
        NoImplementationError: no linear backend, or not the one asked for, can do the work.
        ValueError: `linear_backend` or `quantize_activations` for a checkpoint that has nothing
            which they could be for; the device "meta", which holds no weights.
    """
    device = device_or_default(device)
    if device.type == "meta":
        raise ValueError("device: expected one that holds weights, got 'meta'")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    checkpoint = or_load_error(path, Checkpoint.read, local_folder(path))
    try:
        model = _load(
            checkpoint, dtype, device, linear_backend, quantize_activations, batch_invariant
        )
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    checkpoint.stay_with(model)
    register()
    return model


def _load(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    device: torch.device,
    linear_backend: str | None,
    quantize_activations: bool | None,
    batch_invariant: bool,
) -> PreTrainedModel:
    folder, config, declaration = checkpoint.folder, checkpoint.config, checkpoint.declaration
    options = LayerOptions(
        dtype=resolve_dtype(dtype, config, checkpoint.index),
        device=device,
        backend=linear_backend,
        quantize_activations=quantize_activations,
        batch_invariant=batch_invariant,
    )
    if declaration is None or not declaration.groups:
        for name, value in [
            ("linear_backend", linear_backend),
            ("quantize_activations", quantize_activations),
        ]:
            if value is not None:
                raise ValueError(f"{name}: got {value!r}, but {folder} has no NVFP4 layers")
        _adapt_quantization(folder, config, declaration)
    if getattr(config, "quantization_config", None) is None or declaration is not None:
        return load_streamed(checkpoint, options)
    check_bytes(empty_model(folder, config, options.dtype), checkpoint.index)
    model, info = or_load_error(
        folder,
        AutoModelForCausalLM.from_pretrained,
        folder,
        config=config,
        **LOCAL_FILES,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, in one line
    )
    _check_complete(folder, info)
    return model.to(device).eval()


def device_or_default(device: torch.device | str | None) -> torch.device:
    """The one that is asked for, else a GPU if there is one, else the CPU.

    Raises:
        ValueError: no device's name, or a GPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one of this machine, which has no GPU, got '{found}'")
    return found


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a checkpoint, or of a folder or hub id that has nothing else.

    Raises:
        ModelLoadError: it has none, or it cannot be read.
    """
    folder = Path(path)
    if not has_tokenizer(folder):
        folder = local_folder(path)
    if (folder / "config.json").is_file():
        check_is_data(folder)  # the tokenizer's class may depend on it
    check_tokenizer_files(folder)
    tokenizer = or_load_error(path, AutoTokenizer.from_pretrained, folder, **LOCAL_FILES)
    check_tokenizer(path, tokenizer)
    return tokenizer


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


def _adapt_quantization(path: str | Path, config: Any, declaration: Declaration | None) -> None:
    """Keep what a checkpoint declares of its KV cache where transformers does not trip over it."""
    section = getattr(config, "quantization_config", None)
    if declaration is not None:
        # Only the cache is quantized: no need for the packages that unpack weights.
        config.quantization = dict(declaration.section or {})
        if section is not None:
            del config.quantization_config
    elif isinstance(section, Mapping):
        method = section.get("quant_method")
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
            raise ModelLoadError(
                f"{path}: quantization_config.quant_method: expected modelopt, compressed-tensors "
                f"or a method that transformers reads, found {method!r}"
            )
        config.quantization_config, cache = without_cache(section)
        if cache:
            config.quantization = cache


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
    quantized = [name for name in info.get("unexpected_keys", ()) if QUANTIZED_WEIGHT.search(name)]
    if quantized:
        raise ModelLoadError(
            f"{path}: has quantized weights that cannot be read: {_some(sorted(quantized))}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
