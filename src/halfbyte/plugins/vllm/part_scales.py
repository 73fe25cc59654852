"""Global scales of fused parts, kept from being merged.

Fused layers (q, k and v; gate and up) may have a global scale for each part. vLLM keeps their
maximum alone, which is wrong for the other parts. The scales are put aside before that happens, and
halfbyte's kernels use each for its own rows.
"""

from functools import wraps
from typing import Any

import torch

_DECODE, _ENCODE = "halfbyte_decode_scales", "halfbyte_encode_scales"
"""Attributes of a layer while vLLM merges its scales."""


def keep_part_scales(method: Any) -> None:
    """Let a class that processes weights put the scales of a layer's parts aside while it does."""
    process = method.process_weights_after_loading

    @wraps(process)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        for own_name, kept in (
            ("weight_scale_2", _DECODE),
            ("weight_global_scale", _ENCODE),
        ):
            scales = getattr(layer, own_name, None)
            if scales is not None:
                setattr(layer, kept, scales.data.clone())
        try:
            process(self, layer)
        finally:
            for kept in (_DECODE, _ENCODE):
                vars(layer).pop(kept, None)

    method.process_weights_after_loading = process_weights_after_loading


def part_scales(layer: Any, num_parts: int) -> torch.Tensor:
    """float32 `[parts]`, decode scales: those put aside, else the merged one for every part."""
    decode, encode = getattr(layer, _DECODE, None), getattr(layer, _ENCODE, None)
    if decode is None and encode is not None:
        decode = 1.0 / encode.float()
    if decode is not None and decode.numel() == num_parts:
        return decode.float().reshape(-1)
    merged = layer.weight_global_scale.data.float().reshape(-1).max()
    return merged.reshape(1).expand(num_parts).clone()
