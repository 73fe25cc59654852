"""Checks of `LLM` options that need no loaded model."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from halfbyte.attention import check_attention_backend
from halfbyte.kvcache import KVScales
from halfbyte.layouts.arguments import finite_number, integer
from halfbyte.linear import NvFp4Linear
from halfbyte.models import LayerDTypes, check_layer_dtypes
from halfbyte.moe import ExpertsLayer


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError unless every size is None or an integer of at least 1."""
    for name, number in sizes.items():
        if number is not None and integer(name, number) < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")


def check_cache_options(
    kv_cache_dtype: LayerDTypes,
    v_cache_dtype: LayerDTypes | None,
    kv_scales: KVScales | str | Path | None,
    attention_backend: str | None,
    device: torch.device,
) -> None:
    """Raise for invalid formats, scales or backend."""
    check_attention_backend(attention_backend, device)
    check_layer_dtypes(kv_cache_dtype)
    if v_cache_dtype is not None:
        check_layer_dtypes(v_cache_dtype)
    if kv_scales is not None and not isinstance(kv_scales, KVScales | str | Path):
        found = type(kv_scales).__name__
        raise ValueError(f"kv_scales: expected KVScales or a file, got {found}")


def check_memory_share(
    gpu_memory_utilization: float | None, num_pages: int | None, device: torch.device
) -> None:
    """Raise ValueError for a share outside (0, 1], or one that has no effect here."""
    if gpu_memory_utilization is None:
        return
    expected = "a number in (0, 1]"
    share = finite_number("gpu_memory_utilization", gpu_memory_utilization, expected)
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization: expected {expected}, got {share}")
    if num_pages is not None:
        raise ValueError("gpu_memory_utilization, num_pages: expected one of them, got both")
    if device.type != "cuda":
        raise ValueError(
            f"gpu_memory_utilization: is for GPUs, and the device is {device}; give num_pages"
        )


def check_batch_invariant(model: PreTrainedModel) -> None:
    """Raise ValueError if any layer of the model was loaded without `batch_invariant`."""
    for name, layer in model.named_modules():
        if isinstance(layer, NvFp4Linear | ExpertsLayer) and not layer.batch_invariant:
            raise ValueError(
                f"batch_invariant: {name} was loaded without it; pass it to load_model as well"
            )


def one_of(**names: int | None) -> int | None:
    """The value of an option that has several names.

    Raises:
        ValueError: two values are given, and differ.
    """
    given = {value for value in names.values() if value is not None}
    if len(given) > 1:
        values = " and ".join(str(value) for value in names.values())
        raise ValueError(f"{', '.join(names)}: are one option, got {values}")
    return next(iter(given), None)
