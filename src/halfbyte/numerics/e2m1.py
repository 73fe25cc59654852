"""E2M1, the 4-bit float: one sign bit, two exponent bits, one mantissa bit.

A code is `s|ee|m`. The eight magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6; there is no NaN and no
infinity. Two codes share a byte, the even element in the low nibble (OCP Microscaling Formats
v1.0, section 5.3.3; the packing is that of ModelOpt, compressed-tensors and the PTX ISA).

Details that must not be simplified:
- Rounding is to nearest, ties to the even *code* (0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2,
  2.5 -> 2, 3.5 -> 4, 5 -> 4), so the comparisons below alternate between `>` and `>=`.
- The sign bit is set if and only if `x < 0`: -0.0 is code 0, while -0.1 is code 8 (minus zero).
"""

from functools import lru_cache

import torch

E2M1_MAX = 6.0
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)

# Upper ends of the intervals that round to magnitude codes 0..6. `below(b)` turns the tie at b
# into one that rounds up, because bucketize counts the boundaries strictly below a value.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_ROUND_UP = (False, True, False, True, False, True, False)


@lru_cache(maxsize=16)
def _boundaries(device: torch.device) -> torch.Tensor:
    ties = torch.tensor(_TIES, dtype=torch.float32, device=device)
    below = torch.nextafter(ties, torch.zeros_like(ties))
    return torch.where(torch.tensor(_TIES_ROUND_UP, device=device), below, ties)


@lru_cache(maxsize=16)
def _pair_table(device: torch.device) -> torch.Tensor:
    """float32 `[256, 2]`: the two values that one byte holds, low nibble first."""
    byte = torch.arange(256, device=device)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round each value to its nearest E2M1 code.

    Args:
        x: float tensor of any shape; values beyond ±6 (and ±Inf) saturate. NaN has no code and
            becomes 7 (the caller marks NaN in the block's scale).

    Returns:
        uint8 codes 0..15, the shape of `x`.
    """
    x = x.float()
    boundaries = _boundaries(x.device)
    magnitude = torch.bucketize(x.abs().contiguous(), boundaries, out_int32=True).to(torch.uint8)
    return magnitude | sign_bits(x)


def sign_bits(x: torch.Tensor) -> torch.Tensor:
    """uint8 8 where `x < 0`, else 0: the sign bit of a code, which -0.0 and NaN do not set."""
    return (x < 0).to(torch.uint8) << 3


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E2M1 codes (uint8 0..15, any shape); exact in 16 bits or more."""
    return _pair_table(codes.device)[codes.int(), 0].to(dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes `uint8 [..., D/2]` of codes `uint8 [..., D]`, even elements in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last dimension must be even to pack, got {codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Codes `uint8 [..., D]` of packed bytes `uint8 [..., D/2]`; the inverse of `pack`."""
    return torch.stack([data & 0xF, data >> 4], dim=-1).flatten(-2)


def decode_packed(data: torch.Tensor) -> torch.Tensor:
    """float32 values `[..., D]` of packed bytes `uint8 [..., D/2]`, one table look-up per byte."""
    return _pair_table(data.device)[data.int()].flatten(-2)
