"""E4M3 (`float8_e4m3fn`): block scales of NVFP4 and values of the fp8 cache.

Bias 7, largest 448, smallest subnormal 2^-9, NaN 0x7F, no infinity (OCP 8-bit Floating Point
Specification v1.0). Values are clamped before the cast because torch 2.11 turns overflow into NaN
where 2.13 saturates, and NaN is written as 0x7F whatever its sign because devices differ there.
"""

import torch

E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
E4M3_NAN = 0x7F


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3, to nearest with ties to even, saturating at ±448.

    Args:
        x: float tensor of any shape; ±Inf saturates, NaN becomes 0x7F.

    Returns:
        uint8 bytes, the shape of `x`.
    """
    x = x.float()
    bits = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x), E4M3_NAN, bits)


def decode(bits: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E4M3 bytes (uint8 or float8_e4m3fn, any shape); exact in 16 bits or more."""
    return bits.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
