"""Finds weights that a checkpoint lacks, or that are NaN: vLLM checks few of them.

Parameters are filled before loading with values that no checkpoint has. For GPT-OSS only biases are
filled: vLLM pads codes and scales with zeros that must stay. Its files have one tensor for all
experts of a layer, so one that is all zero was not loaded. Biases may be zero.
"""

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.checkpoints.validate import is_bad_block_scale
from halfbyte.moe.experts import WeightFormat

_UNLOADED_SCALES = {"nvfp4": 0x7F, "mxfp4": 0xFF}
"""NaN in E4M3 and in E8M0."""
_UNLOADED_CODES = 0x88
"""A byte with two codes of -0.0: a matrix that has only this byte was not loaded."""
_UNLOADED_BIAS = 0x7FB5
"""NaN in bfloat16 and float16 (twice in float32), with bits that no computation gives."""
_GLOBAL_SCALES = "weight_scale_2", "weight_global_scale"
_NO_CODES = "codes are missing"
_BAD_SCALES = "block scales are missing, NaN or negative"
_BAD_GLOBAL = "global scale is missing, or not positive"
_NO_BIASES = "biases are missing"
_BAD_BIASES = "biases are NaN or infinite"
_PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def mark_linear(layer: Any) -> None:
    """Fill the parameters of an NVFP4 linear layer before its weights are loaded.

    Args:
        layer: vLLM's, with parameters.
    """
    _mark(layer, "", "nvfp4")


def check_linear(layer: Any, part_sizes: Sequence[int], global_scales: torch.Tensor) -> None:
    """Raise ValueError for weights that were not loaded, and for invalid scales (NaN, negative).

    Args:
        layer: vLLM's, as its method prepares it for a kernel.
        part_sizes: rows of each fused part, in the order of the codes; none is 0.
        global_scales: `[parts]`.
    """
    sizes = list(part_sizes)
    codes, scales = layer.weight.data.split(sizes), layer.weight_scale.data.split(sizes)
    for what, bad in (
        (_NO_CODES, torch.cat([_is_unloaded(part, 1) for part in codes])),
        (_BAD_SCALES, torch.cat([_has_bad(part, 1, "nvfp4") for part in scales])),
        (_BAD_GLOBAL, ~_is_positive(global_scales)),
    ):
        found = bad.nonzero().flatten().tolist()
        if found:
            where = f", in part {found[0]}" if len(sizes) > 1 else ""
            raise ValueError(f"{layer.prefix}: {what}{where}")


def codes_of(layer: Any, name: str) -> torch.Tensor:
    """uint8 `[experts, N, K/2]` of matrix `w13` or `w2`."""
    return _codes_of(layer, f"{name}_")


def mark_unloaded(layer: Any, weight_format: WeightFormat) -> None:
    """Fill the parameters of a layer before its weights are loaded.

    Args:
        layer: vLLM's `RoutedExperts`, with parameters.
        weight_format: theirs.
    """
    for name in _PROJECTIONS:
        _mark(layer, f"{name}_", weight_format)


def check_experts(layer: Any, weight_format: WeightFormat) -> None:
    """Raise ValueError for weights that were not loaded, and for invalid scales (NaN, negative).

    Args:
        layer: vLLM's `RoutedExperts`; `mark_unloaded` before its weights were loaded.
        weight_format: of the weights.
    """
    for name, projections in _PROJECTIONS.items():
        parts = len(projections)
        codes, scales = codes_of(layer, name), getattr(layer, f"{name}_weight_scale").data
        # Expert by expert: all at once would take a layer's size again. One sync for each kind.
        missing = torch.stack([_is_unloaded(expert, parts) for expert in codes])
        _refuse_first(layer, projections, _NO_CODES, missing)
        bad = torch.stack([_has_bad(expert, parts, weight_format) for expert in scales])
        _refuse_first(layer, projections, _BAD_SCALES, bad)
        global_scale = _global_scale_of(layer, f"{name}_")
        if global_scale is not None:
            global_scale = global_scale.reshape(len(codes), -1)
            _refuse_first(layer, projections, _BAD_GLOBAL, ~_is_positive(global_scale))


def mark_gpt_oss(layer: Any) -> None:
    """Fill the biases of a layer before its weights are loaded.

    Args:
        layer: vLLM's `RoutedExperts`, with parameters for GPT-OSS's files.
    """
    for bias in _biases_of(layer).values():
        bias.view(torch.int16).fill_(_UNLOADED_BIAS)


def check_gpt_oss(layer: Any, tp_rank: int) -> None:
    """Raise ValueError for tensors of a layer that were not loaded, block scales that are NaN, or
    biases that are not finite.

    Padding of biases becomes zero.

    Args:
        layer: vLLM's `RoutedExperts`, with MXFP4 weights of GPT-OSS's files; `mark_gpt_oss` before
            its weights were loaded.
        tp_rank: only rank 0 is checked for missing weights and biases: other ranks' shares may be
            nothing but padding.
    """
    for name in _PROJECTIONS if tp_rank == 0 else ():
        for suffix in ("weight", "weight_scale"):
            tensor = getattr(layer, f"{name}_{suffix}").data
            if tensor.numel() and not tensor.any():
                raise ValueError(f"{layer.layer_name}: {name}_{suffix} of all experts is missing")
    for name in _PROJECTIONS:
        scales = getattr(layer, f"{name}_weight_scale").data
        bad = torch.stack([_has_bad(expert, 1, "mxfp4") for expert in scales])
        _refuse_first(layer, _gpt_oss_projection(name), "block scales are NaN", bad)
    for name, bias in _biases_of(layer).items():
        unloaded = (bias.view(torch.int16) == _UNLOADED_BIAS).view(*bias.shape, -1).all(-1)
        projection = _gpt_oss_projection(name)
        missing = unloaded.all(1) & (tp_rank == 0)
        _refuse_first(layer, projection, _NO_BIASES, missing[:, None])
        bias[unloaded] = 0
        _refuse_first(layer, projection, _BAD_BIASES, ~bias.isfinite().all(1, keepdim=True))


def _gpt_oss_projection(name: str) -> tuple[str, ...]:
    """The only part of a matrix in GPT-OSS's files."""
    return ("gate_up_proj",) if name == "w13" else _PROJECTIONS[name]


def _biases_of(layer: Any) -> dict[str, torch.Tensor]:
    """`[experts, N]` by matrix; of layers without biases none."""
    found = {name: getattr(layer, f"{name}_bias", None) for name in _PROJECTIONS}
    return {name: bias.data for name, bias in found.items() if bias is not None}


def _mark(layer: Any, prefix: str, weight_format: WeightFormat) -> None:
    """Fill the parameters of a matrix, whose names begin with `prefix`."""
    _codes_of(layer, prefix).fill_(_UNLOADED_CODES)
    scales = getattr(layer, f"{prefix}weight_scale").data
    scales.view(torch.uint8).fill_(_UNLOADED_SCALES[weight_format])
    global_scale = _global_scale_of(layer, prefix)
    if global_scale is not None:
        global_scale.fill_(torch.nan)


def _codes_of(layer: Any, prefix: str) -> torch.Tensor:
    packed = getattr(layer, f"{prefix}weight_packed", None)
    codes: torch.Tensor = (getattr(layer, f"{prefix}weight") if packed is None else packed).data
    return codes


def _global_scale_of(layer: Any, prefix: str) -> torch.Tensor | None:
    """By ModelOpt's name or by compressed-tensors'; None for MXFP4."""
    found = (getattr(layer, f"{prefix}{name}", None) for name in _GLOBAL_SCALES)
    return next((x.data for x in found if x is not None), None)


def _is_unloaded(codes: torch.Tensor, parts: int) -> torch.Tensor:
    return (codes == _UNLOADED_CODES).view(parts, -1).all(1)


def _is_positive(scales: torch.Tensor) -> torch.Tensor:
    return scales.isfinite() & (scales > 0)


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
