"""Random NVFP4 layers, their expected results in float64, and the tolerance of kernels."""

from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.linear import NvFp4Linear
from halfbyte.numerics import nvfp4

INPUT_AMAX = 6.0
_AS_MADE: WeakKeyDictionary[nn.Module, NvFp4Linear] = WeakKeyDictionary()
"""Copies of random layers before their kernel repacked them."""


def random_layer(
    n: int,
    k: int,
    *,
    bias: bool = False,
    part_sizes: tuple[int, ...] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> NvFp4Linear:
    """A layer quantized from random weights, whose parts differ in size by powers of ten.

    Args:
        n, k: output and input features.
        bias, part_sizes, dtype, options: of the layer; W4A4 gets `INPUT_AMAX`.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias, device="meta").to_empty(device="cpu")
    weight = torch.randn(n, k, generator=generator) / k**0.5
    for index, part in enumerate(weight.split(part_sizes or (n,))):
        part *= 10.0**-index
    linear.weight.data = weight
    if bias:
        linear.bias.data = torch.randn(n, generator=generator)
    amax = INPUT_AMAX if options.get("quantize_activations") else None
    layer = NvFp4Linear.from_float(
        linear, input_amax=amax, part_sizes=part_sizes, dtype=dtype, **options
    )
    _AS_MADE[layer] = deepcopy(layer)
    return layer


def random_input(m: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Random `[m, k]` without zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    return torch.where(x.abs() < 1e-3, 1e-3, x).to(dtype)


def effective_input(layer: NvFp4Linear, x: torch.Tensor) -> torch.Tensor:
    """The left operand in float64: x, for W4A4 quantized and dequantized."""
    if not layer.quantize_activations:
        return x.double()
    scale = layer.loaded_scale("input_global_scale").to(x.device)
    return nvfp4.dequantize(*nvfp4.quantize(x, scale), scale, torch.float64)


def _weights(layer: NvFp4Linear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantized, on the device of x."""
    try:
        return layer.dequantize(dtype)
    except RuntimeError:  # the kernel has no `restore_weights`
        return _AS_MADE[layer].dequantize(dtype).to(x.device)


def reference64(layer: NvFp4Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in float64."""
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(effective_input(layer, x), _weights(layer, x, torch.float64), bias)


def baseline(layer: NvFp4Linear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """PyTorch's own matmul of that dtype on the dequantized weights."""
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return F.linear(effective_input(layer, x).to(dtype), _weights(layer, x, dtype), bias)


def assert_close_enough(
    layer: NvFp4Linear,
    x: torch.Tensor,
    out: torch.Tensor,
    baseline_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Tier 2, per part: `max|out - ref64| <= 2 max|baseline - ref64| + 1e-5 max|ref64|`."""
    assert out.shape == (*x.shape[:-1], layer.out_features)
    assert out.dtype == x.dtype
    wanted = reference64(layer, x)
    usual = baseline(layer, x, baseline_dtype).double()
    sizes = list(layer.part_sizes)
    for part, (o, w, b) in enumerate(
        zip(*(t.split(sizes, dim=-1) for t in (out.double(), wanted, usual)), strict=True)
    ):
        error, allowed = (o - w).abs().max(), 2 * (b - w).abs().max() + 1e-5 * w.abs().max()
        assert error <= allowed, f"part {part}: error {error:.3g}, allowed {allowed:.3g}"
