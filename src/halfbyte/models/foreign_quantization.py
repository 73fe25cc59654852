"""Checkpoints quantized by another method, which transformers loads."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from halfbyte.checkpoints.dialects.base import declared_cache
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.validate import FLOATS, QUANTIZED_WEIGHT
from halfbyte.models.foreign_cache import without_cache
from halfbyte.models.local_files import LOCAL_FILES, ModelLoadError, or_load_error
from halfbyte.models.nvfp4.experts import fused_experts

logger = logging.getLogger("halfbyte")


def load_by_transformers(folder: Path, config: Any, dtype: str | torch.dtype) -> PreTrainedModel:
    """Load a model with `from_pretrained`.

    Args:
        folder: of the checkpoint.
        config: its config, after `leave_weights_to_transformers`.
        dtype: as for `load_model`.

    Raises:
        ModelLoadError: missing, truncated or mismatched files; one line.
    """
    model: PreTrainedModel
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
    return model


def leave_weights_to_transformers(folder: Path, config: Any) -> None:
    """Hide a config's KV cache declaration from transformers; halfbyte keeps it.

    Raises:
        ModelLoadError: a method that transformers does not read.
        CheckpointError: a cache that is not read here.
    """
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, Mapping):
        return
    method = section.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        raise ModelLoadError(
            f"{folder}: quantization_config.quant_method: expected modelopt, compressed-tensors "
            f"or a method that transformers reads, found {method!r}"
        )
    declared_cache(folder, section)  # raises for fields that transformers would drop
    config.quantization_config, cache = without_cache(section)
    if cache:
        config.quantization = cache


def warn_of_dequantized_experts(
    model: PreTrainedModel, index: CheckpointIndex, config: Any
) -> None:
    """Log a warning for experts of compressed-tensors, which transformers fuses in 16 bits.

    Args:
        model: on the meta device.
        index: of the files.
        config: of the checkpoint, after `leave_weights_to_transformers`.
    """
    section = config.quantization_config
    if not isinstance(section, Mapping) or section.get("quant_method") != CompressedTensors.name:
        return
    blocks = [name for name, module in model.named_modules() if fused_experts(module) is not None]
    for name, entry in index.tensors.items():
        is_weight = name.endswith((".weight", ".weight_packed")) and entry.dtype not in FLOATS
        if is_weight and any(name.startswith(f"{block}.") for block in blocks):
            logger.warning(
                "%s: experts in compressed-tensors' %s are dequantized to 16 bits by transformers; "
                "experts in NVFP4 and MXFP4 run in four bits",
                index.folder,
                section.get("format"),
            )
            return


def _check_complete(path: str | Path, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ModelLoadError(f"{path}: {_first_names(missing)} missing")
    mismatched = [
        f"{name} (file {tuple(found)}, model {tuple(expected)})"
        for name, found, expected in sorted(info.get("mismatched_keys", ()))
    ]
    if mismatched:
        raise ModelLoadError(f"{path}: wrong shape: {_first_names(mismatched)}")
    quantized = [name for name in info.get("unexpected_keys", ()) if QUANTIZED_WEIGHT.search(name)]
    if quantized:
        raise ModelLoadError(
            f"{path}: has quantized weights that cannot be read: {_first_names(sorted(quantized))}"
        )


def _first_names(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
