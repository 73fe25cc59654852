"""A `KVTransform` and a calibration with made-up means, angles and first tokens."""

from dataclasses import fields, replace
from typing import Any

import torch

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.calibration import (
    ErrorCosts,
    KVCalibration,
    LayerCalibration,
    RopeAverages,
)
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.kvcache.transform import KVTransform
from halfbyte.numerics.weighted_rounding import channel_weights, feedback_factor

SEGMENT = 16


def make_transform(
    heads: int = 2,
    head_size: int = 64,
    head_size_v: int | None = None,
    *,
    rotate: bool = True,
    center: bool = True,
    first_tokens: int = 2,
    segment: int = SEGMENT,
    segments: int = 8,
    dtype: torch.dtype = torch.float32,
    feedback: bool = False,
    weighted: bool = False,
    interleaved: bool = False,
) -> KVTransform:
    """Random; RoPE pairs channels i and i + D/2, or interleaved, i and i ^ 1."""
    generator = torch.Generator().manual_seed(3)
    angles = torch.rand(segments, head_size // 2, generator=generator) * 6
    channels = torch.arange(head_size)
    partner = channels ^ 1 if interleaved else channels.roll(head_size // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)
    if interleaved:
        cos, sin = (x.unflatten(1, (2, -1)).mT.flatten(1) for x in (cos, sin))
    mean = 3 * torch.randn(heads, head_size, generator=generator)
    firsts = 9 * torch.randn(first_tokens, heads, head_size, generator=generator)
    values = torch.randn(first_tokens, heads, head_size_v or head_size, generator=generator)
    factor, weights = feedback_factor(make_moment(heads, head_size, generator))
    energy = torch.rand(heads, head_size_v or head_size, generator=generator).double()
    return KVTransform(
        rotate,
        segment,
        mean=mean if center else None,
        partner=partner if center else None,
        cos=cos if center else None,
        sin=sin if center else None,
        first_keys=firsts.to(dtype) if first_tokens else None,
        first_values=values.to(dtype) if first_tokens else None,
        feedback=factor if feedback else None,
        k_weights=weights if weighted else None,
        v_weights=channel_weights(energy) if weighted else None,
    )


def make_moment(heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """E[q q^T] of correlated queries: float64 `[heads, size, size]`."""
    q = torch.randn(heads, 4 * size, size, generator=generator).double()
    q[..., 1::2] = 0.2 * q[..., 1::2] + 0.8 * q[..., ::2]
    return q.transpose(1, 2) @ q / (4 * size)


def on(x: Any, device: torch.device | str) -> Any:
    """Move tensors, transforms and `RecentInputs` to a device; other objects stay unchanged."""
    if isinstance(x, KVTransform):
        return replace(x, **{field.name: on(getattr(x, field.name), device) for field in fields(x)})
    if isinstance(x, RecentInputs):
        return RecentInputs(*(on(value, device) for value in x))
    return x.to(device) if isinstance(x, torch.Tensor) else x


def make_calibration(seed: int = 0, layers: int = 3) -> KVCalibration:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    partner = torch.arange(32).roll(16)
    turning = torch.cat([-torch.eye(16), torch.eye(16)], 1)
    ropes = tuple(
        RopeAverages(random(5, 16).repeat(1, 2), random(5, 16) @ turning, partner) for _ in range(2)
    )
    measured = tuple(
        LayerCalibration(
            mean=random(2, 32),
            k_amax=(7.0 + layer, 6.0, 5.0, 4.0),
            v_amax=0.1,
            first_keys=random(2, 2, 32).bfloat16(),
            first_values=random(2, 2, 16).bfloat16(),
            rope=layer % 2,
            costs=ErrorCosts.of(
                make_moment(2, 32, generator), torch.rand(2, 16, generator=generator).double()
            ),
        )
        for layer in range(layers)
    )
    return KVCalibration(64, (1, 17), measured, ropes)


def without_costs(calibration: KVCalibration) -> KVCalibration:
    """A calibration as older versions wrote it, without costs of errors."""
    layers = tuple(replace(layer, costs=None) for layer in calibration.layers)
    return replace(calibration, layers=layers)


def with_heads(scales: KVScales, heads: int) -> KVScales:
    """Scales that name no model, with a calibration of copies of its first KV head."""
    assert scales.calibration is not None
    copies = [0] * heads
    layers = tuple(
        replace(
            layer,
            mean=layer.mean[copies],
            first_keys=layer.first_keys[:, copies],
            first_values=layer.first_values[:, copies],
            costs=layer.costs
            and ErrorCosts(
                layer.costs.factors[:, copies],
                layer.costs.k_weights[:, copies],
                layer.costs.v_weights[copies],
            ),
        )
        for layer in scales.calibration.layers
    )
    return replace(scales, shape={}, calibration=replace(scales.calibration, layers=layers))
