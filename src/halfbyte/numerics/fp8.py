"""FP8 with one float32 scale per tensor: `x ~ fp8 * scale` (a decode scale).

The largest magnitude maps to the largest finite value of the format: `scale = amax / 448` for
E4M3, `amax / 57344` for E5M2. Encoding divides (a true division) in float32 and rounds once.
"""

from typing import Literal

import torch

from halfbyte.numerics import e4m3, e5m2

Fp8Format = Literal["e4m3", "e5m2"]
_MAX: dict[str, float] = {"e4m3": e4m3.E4M3_MAX, "e5m2": e5m2.E5M2_MAX}
_MODULES = {"e4m3": e4m3, "e5m2": e5m2}


def scale_from_amax(amax: float | torch.Tensor, fmt: Fp8Format = "e4m3") -> torch.Tensor:
    """Decode scale (float32) for a tensor whose largest magnitude is `amax`; 1 for amax 0."""
    # In float64, so that `scale * 448` (exact there) gives back the very float32 `scale`.
    if not isinstance(amax, torch.Tensor):
        amax = torch.tensor(amax, dtype=torch.float64, device="cpu")
    scale = (amax.double() / _MAX[fmt]).float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize(x: torch.Tensor, scale: float | torch.Tensor, fmt: Fp8Format = "e4m3") -> torch.Tensor:
    """Bytes (uint8, the shape of `x`) of `x / scale` rounded to nearest even, saturating.

    `scale` is a positive float or a float32 tensor that broadcasts against `x`. NaN becomes 0x7F.
    """
    if not isinstance(scale, torch.Tensor) and not 0 < scale < float("inf"):
        raise ValueError(f"scale: expected a positive finite number, got {scale}")
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return _MODULES[fmt].encode(x.float() / divisor)


def dequantize(
    data: torch.Tensor,
    scale: float | torch.Tensor,
    fmt: Fp8Format = "e4m3",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values `fp8 * scale` of bytes (uint8, any shape), multiplied in float32."""
    factor = torch.as_tensor(scale, dtype=torch.float32, device=data.device)
    return (_MODULES[fmt].decode(data) * factor).to(dtype)
