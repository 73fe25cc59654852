"""Keeps the global scales of a fused layer's parts.

Fused layers (q, k and v; gate and up) may have a global scale for each part. vLLM merges them into
their maximum, which is wrong for the other parts. The scales are saved before that, and halfbyte's
kernels apply each to its own rows.
"""

from functools import wraps
from typing import Any

import torch

_DECODE, _ENCODE = "halfbyte_decode_scales", "halfbyte_encode_scales"
"""Attributes that hold a layer's saved scales while vLLM merges them."""


def keep_part_scales(method: Any) -> None:
    """Make a vLLM method class save the scales of parts before it processes a layer's weights."""
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
    """float32 `[parts]`, decode scales: the saved ones, else the merged one for every part."""
    decode, encode = getattr(layer, _DECODE, None), getattr(layer, _ENCODE, None)
    if decode is None and encode is not None:
        decode = 1.0 / encode.float()
    if decode is not None and decode.numel() == num_parts:
        return decode.float().reshape(-1)
    merged = layer.weight_global_scale.data.float().reshape(-1).max()
    return merged.reshape(1).expand(num_parts).clone()
