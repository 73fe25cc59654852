"""E8M0, the power-of-two block scale of the MX formats: byte `b` is 2^(b - 127), 0xFF is NaN.

OCP Microscaling Formats v1.0, section 5.4.1. There is no zero: a block of zeros has the
smallest scale, byte 0.
"""

import torch

E8M0_BIAS = 127
E8M0_MAX_BYTE = 254
E8M0_NAN = 0xFF


def encode(exponent: torch.Tensor) -> torch.Tensor:
    """Bytes (uint8) of integer exponents (any int dtype), clamped to -127 .. 127."""
    return (exponent.int() + E8M0_BIAS).clamp(0, E8M0_MAX_BYTE).to(torch.uint8)


def decode(bits: torch.Tensor) -> torch.Tensor:
    """float32 scales of E8M0 bytes (uint8, any shape), built from bits and therefore exact."""
    exponent_field = bits.to(torch.int32) << 23
    # Byte 0 is 2^-127, a float32 subnormal; byte 255 would read as infinity.
    exponent_field = torch.where(bits == 0, 0x0040_0000, exponent_field)
    return torch.where(bits == E8M0_NAN, 0x7FC0_0000, exponent_field).view(torch.float32)
