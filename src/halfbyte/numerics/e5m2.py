"""E5M2 (`float8_e5m2`): values of the fp8_e5m2 cache.

Bias 15, largest finite 57344, smallest subnormal 2^-16 (OCP 8-bit Floating Point Specification
v1.0). The format has infinities, which halfbyte never writes: overflow and ±Inf saturate, as in
the other formats of the cache. NaN is written as 0x7F.
"""

import torch

E5M2_MAX = 57344.0
E5M2_NAN = 0x7F


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round to E5M2, to nearest with ties to even, saturating at ±57344; uint8 bytes."""
    x = x.float()
    bits = x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).view(torch.uint8)
    return torch.where(torch.isnan(x), E5M2_NAN, bits)


def decode(bits: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E5M2 bytes (uint8 or float8_e5m2, any shape)."""
    return bits.view(torch.float8_e5m2).to(torch.float32).to(dtype)
