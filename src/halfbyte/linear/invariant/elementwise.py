"""Elementwise functions on a CPU whose results do not depend on the position in the tensor.

PyTorch computes `silu` and others with one approximation in full SIMD vectors and another, slightly
different one in the remainder of a thread's range, so results depend on the number of rows. They
are rebuilt here from `exp`, `tanh`, `erf` and `log1p`, which use the same code everywhere, and from
correctly rounded arithmetic."""

import math
from collections.abc import Callable
from typing import Any

import torch

_ATEN = torch.ops.aten


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))).tanh())


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    return torch.where(x * beta > threshold, x, (x * beta).exp().log1p() / beta)


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return 1 / x.sqrt()


def _in_float32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute in float32 and round once, as PyTorch does for smaller floats."""

    def rounded(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        wide = x if dtype == torch.float64 else x.float()
        return function(wide, *args, **kwargs).to(dtype)

    return rounded


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


_FUNCTIONS = {
    "sigmoid": _in_float32(_sigmoid),
    "silu": _in_float32(_silu),
    "gelu": _in_float32(_gelu),
    "softplus": _in_float32(_softplus),
    "rsqrt": _in_float32(_rsqrt),
}

ELEMENTWISE: dict[Any, Callable[..., torch.Tensor]] = {
    getattr(_ATEN, name).default: function for name, function in _FUNCTIONS.items()
} | {
    getattr(_ATEN, f"{name}_").default: _in_place(_FUNCTIONS[name])
    for name in ("sigmoid", "silu", "gelu", "rsqrt")
}
"""ATen operators and their replacements."""
