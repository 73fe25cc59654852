"""E2M1 with one E8M0 (power-of-two) scale per block and no global scale: `mxfp4`, `fp4_block16`.

- `mxfp4` (OCP Microscaling Formats v1.0, section 6.3): blocks of 32, exponent
  `floor(log2 amax) - 2`. The block maximum lands in [4, 8): magnitudes above 6 saturate.
- `fp4_block16`: blocks of 16, exponent `ceil(log2(amax / 6))`. The block maximum lands in (3, 6]:
  nothing saturates (SGLang's block-wise FP4 KV cache, PR 21954). Exponents end at 125, so that
  every value reads back finite.

Exponents come from `frexp`, never from a rounded logarithm or quotient. A block of zeros has the
smallest scale (byte 0) and codes 0; a block that holds a NaN has the NaN scale (0xFF) and codes 0;
±Inf counts as the largest finite float32 for the exponent, and saturates.
"""

import torch

from halfbyte.numerics import e2m1, e8m0
from halfbyte.numerics.blocks import block_amax, check_packed, split_blocks

MXFP4_BLOCK_SIZE = 32
FP4_BLOCK16_BLOCK_SIZE = 16
_LARGEST_FINITE_EXPONENT = 125
"""6 * 2^125 is the largest product that float32 can hold."""


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x [..., D]`, D % 32 == 0, to `(uint8 [..., D/2], E8M0 uint8 [..., D/32])`."""
    blocks = split_blocks(x, MXFP4_BLOCK_SIZE)
    amax = _finite_amax(blocks)
    # floor(log2 amax) is the exponent of frexp less one.
    return _encode(blocks, amax, torch.frexp(amax).exponent - 3)


def dequantize_mxfp4(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values `[..., D]` of `quantize_mxfp4`'s result; exact in float32 for scales >= 2^-126."""
    return _decode(data, scales, MXFP4_BLOCK_SIZE, dtype)


def quantize_fp4_block16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x [..., D]`, D % 16 == 0, to `(uint8 [..., D/2], E8M0 uint8 [..., D/16])`."""
    blocks = split_blocks(x, FP4_BLOCK16_BLOCK_SIZE)
    amax = _finite_amax(blocks)
    # amax = m * 2^e with m in [0.5, 1), and 6 = 0.75 * 2^3; a float32 quotient could underflow.
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 3 + (mantissa > 0.75).int()
    return _encode(blocks, amax, exponent.clamp(max=_LARGEST_FINITE_EXPONENT))


def dequantize_fp4_block16(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values `[..., D]` of `quantize_fp4_block16`'s result."""
    return _decode(data, scales, FP4_BLOCK16_BLOCK_SIZE, dtype)


def _finite_amax(blocks: torch.Tensor) -> torch.Tensor:
    return block_amax(blocks).clamp(max=torch.finfo(torch.float32).max)


def _encode(
    blocks: torch.Tensor, amax: torch.Tensor, exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    positive = amax > 0  # false for NaN, too
    scales = torch.where(positive, e8m0.encode(exponent), 0)
    y = blocks / e8m0.decode(scales)[..., None]
    codes = e2m1.encode(y.abs()) | e2m1.sign_bits(blocks)
    codes = torch.where(positive[..., None], codes, 0)
    scales = torch.where(torch.isnan(amax), e8m0.E8M0_NAN, scales)
    return e2m1.pack(codes.flatten(-2)), scales.to(torch.uint8)


def _decode(
    data: torch.Tensor, scales: torch.Tensor, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    check_packed(data, scales, block_size)
    values = e2m1.decode_packed(data).unflatten(-1, (scales.shape[-1], block_size))
    return (values * e8m0.decode(scales.view(torch.uint8))[..., None]).flatten(-2).to(dtype)
