"""Finds weights that a checkpoint lacks, or that are NaN: vLLM checks few of them.

Parameters are filled before loading with what no checkpoint has. GPT-OSS's are not: vLLM leaves
zeros where a rank's share is padded, and its files have one tensor for all experts of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.checkpoints.validate import is_bad_block_scale
from halfbyte.moe.experts import WeightFormat

_UNLOADED_SCALES = {"nvfp4": 0x7F, "mxfp4": 0xFF}
"""NaN in E4M3 and in E8M0."""
_UNLOADED_CODES = 0x88
"""Two values of -0.0: a matrix of nothing else is not loaded."""
_BAD_SCALES = "block scales are missing, NaN or negative"
_PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def mark_linear(layer: Any) -> None:
    """Fill codes and block scales of a linear layer before its weights are loaded, if it is NVFP4.

    Args:
        layer: vLLM's, with parameters.
    """
    codes = getattr(layer, "weight_packed", None)
    codes = getattr(layer, "weight", None) if codes is None else codes
    scales = getattr(layer, "weight_scale", None)
    if codes is None or scales is None:
        return
    if codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn:
        codes.data.fill_(_UNLOADED_CODES)
        scales.data.view(torch.uint8).fill_(_UNLOADED_SCALES["nvfp4"])


def check_linear(layer: Any, part_sizes: Sequence[int]) -> None:
    """Raise ValueError for codes or block scales that were not loaded, or are no numbers.

    Args:
        layer: vLLM's, as its method prepares it for a kernel.
        part_sizes: rows of each fused part, in the order of the codes.
    """
    codes, scales = layer.weight.data, layer.weight_scale.data
    parts = zip(codes.split(list(part_sizes)), scales.split(list(part_sizes)), strict=True)
    flags = [
        ((c == _UNLOADED_CODES).all(), is_bad_block_scale(s).any()) for c, s in parts if len(c)
    ]
    for part, (lacks_codes, has_bad) in enumerate(flags):
        if lacks_codes or has_bad:
            what = (
                "codes are missing" if lacks_codes else "block scales are missing, NaN or negative"
            )
            where = f" of part {part}" if len(flags) > 1 else ""
            raise ValueError(f"{getattr(layer, 'prefix', 'NVFP4 layer')}: {what}{where}")


def parameter_of(layer: Any, name: str, *suffixes: str) -> torch.Tensor | None:
    """The first parameter `{name}_{suffix}` of vLLM's layer that there is."""
    found = (getattr(layer, f"{name}_{suffix}", None) for suffix in suffixes)
    return next((x.data for x in found if x is not None), None)


def codes_of(layer: Any, name: str) -> torch.Tensor:
    """uint8 `[experts, N, K/2]` of matrix `w13` or `w2`."""
    codes = parameter_of(layer, name, "weight_packed", "weight")
    assert codes is not None
    return codes


def mark_unloaded(layer: Any, weight_format: WeightFormat) -> None:
    """Fill the parameters of a layer before its weights are loaded.

    Args:
        layer: vLLM's `RoutedExperts`, with parameters.
        weight_format: theirs.
    """
    for name in _PROJECTIONS:
        codes_of(layer, name).fill_(_UNLOADED_CODES)
        scales = parameter_of(layer, name, "weight_scale")
        assert scales is not None
        scales.view(torch.uint8).fill_(_UNLOADED_SCALES[weight_format])
        for suffix in ("weight_scale_2", "weight_global_scale"):
            global_scale = parameter_of(layer, name, suffix)
            if global_scale is not None:
                global_scale.fill_(torch.nan)


def check_experts(layer: Any, weight_format: WeightFormat) -> None:
    """Raise ValueError for weights that were not loaded, or that are no numbers.

    Args:
        layer: vLLM's `RoutedExperts`; `mark_unloaded` before its weights were loaded.
        weight_format: of the weights.
    """
    for name, projections in _PROJECTIONS.items():
        parts = len(projections)
        codes, scales = codes_of(layer, name), parameter_of(layer, name, "weight_scale")
        assert scales is not None
        # Expert by expert: all at once would take a layer's size again. One sync for each kind.
        missing = torch.stack([_is_unloaded(expert, parts) for expert in codes])
        _refuse_first(layer, projections, "codes are missing", missing)
        bad = torch.stack([_has_bad(expert, parts, weight_format) for expert in scales])
        _refuse_first(layer, projections, _BAD_SCALES, bad)
        global_scale = parameter_of(layer, name, "weight_scale_2", "weight_global_scale")
        if global_scale is not None:
            global_scale = global_scale.reshape(len(codes), -1)
            bad = ~(global_scale.isfinite() & (global_scale > 0))
            what = "global scale is missing, or no positive number"
            _refuse_first(layer, projections, what, bad)


def check_gpt_oss(layer: Any, tp_rank: int) -> None:
    """Raise ValueError for tensors of a layer that were not loaded: they are zero.

    Args:
        layer: vLLM's `RoutedExperts`, with MXFP4 weights of GPT-OSS's files.
        tp_rank: of the first rank's share at least a part is no padding.
    """
    for name in _PROJECTIONS if tp_rank == 0 else ():
        for suffix in ("weight", "weight_scale"):
            tensor = parameter_of(layer, name, suffix)
            if tensor is not None and tensor.numel() and not tensor.any():
                raise ValueError(f"{layer.layer_name}: {name}_{suffix} of all experts is missing")


def _is_unloaded(codes: torch.Tensor, parts: int) -> torch.Tensor:
    return (codes == _UNLOADED_CODES).view(parts, -1).all(1)


def _has_bad(scales: torch.Tensor, parts: int, weight_format: WeightFormat) -> torch.Tensor:
    if weight_format == "mxfp4":
        is_bad = scales.view(torch.uint8) == _UNLOADED_SCALES[weight_format]
    else:
        is_bad = is_bad_block_scale(scales)
    return is_bad.view(parts, -1).any(1)


def _refuse_first(
    layer: Any, projections: tuple[str, ...], what: str, is_bad: torch.Tensor
) -> None:
    """Raise ValueError for the first of `[experts, parts]`."""
    found = is_bad.expand(-1, len(projections)).nonzero()
    if not len(found):
        return
    expert, part = found[0].tolist()
    expert_map = layer.expert_map
    if expert_map is not None:  # this rank's numbers
        expert = int((expert_map == expert).nonzero()[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ValueError(f"{layer.layer_name}: expert {expert}: {projections[part]}'s {what}{more}")
