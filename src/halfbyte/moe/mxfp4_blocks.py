"""MXFP4 weights as NVFP4 with a global scale per row, without loss.

A block of 32 becomes two of 16 with the same scale. A power of two is an E4M3 value from 2^-9 to
2^8, so the exponents of a row's blocks may span 17 if a power of two per row moves the largest to
2^8. Blocks of zeros have any exponent, and scale 0 here."""

import torch

from halfbyte.numerics import e4m3
from halfbyte.numerics.e8m0 import E8M0_BIAS, E8M0_NAN

_LARGEST, _SMALLEST = 8, -9
"""Exponents of E4M3's powers of two."""


def as_nvfp4(
    weight: torch.Tensor, scales: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales and row scales; the codes stay the same.

    Args:
        weight: uint8 `[E, N, K/2]`, E2M1 codes.
        scales: uint8 `[E, N, K/32]`, E8M0.
        name: of the matrices, for messages.

    Returns:
        float8_e4m3fn `[E, N, K/16]` and float32 `[E, N]`, a power of two per row.

    Raises:
        ValueError: a row whose blocks' exponents are too far apart, by expert and row.
    """
    pairs = [
        _of_expert(*expert, f"{name}: expert {i}")
        for i, expert in enumerate(zip(weight, scales, strict=True))
    ]
    blocks = torch.stack([blocks.view(torch.uint8) for blocks, _ in pairs])
    return blocks.view(torch.float8_e4m3fn), torch.stack([rows for _, rows in pairs])


def _of_expert(
    weight: torch.Tensor, scales: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    is_nan = scales == E8M0_NAN
    magnitudes = (weight & 0x77).unflatten(-1, (-1, 16))
    used = (magnitudes != 0).any(-1) & ~is_nan
    exponents = scales.int() - E8M0_BIAS
    largest = torch.where(used, exponents, -E8M0_BIAS).amax(-1)
    relative = exponents - largest[:, None] + _LARGEST
    lost = (used & (relative < _SMALLEST)).any(-1)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise ValueError(
            f"{name}, row {row}: expected MXFP4 exponents within {_LARGEST - _SMALLEST} of the "
            f"row's largest, found {int(exponents[row][used[row]].min())} and "
            f"{int(largest[row])}; the MoE backend 'reference' takes any "
            "(HALFBYTE_MOE_BACKEND=reference)"
        )
    values = torch.where(used, torch.exp2(relative.float()), 0.0)
    encoded = torch.where(is_nan, e4m3.E4M3_NAN, e4m3.encode(values))
    blocks = encoded.repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
    return blocks, torch.exp2((largest - _LARGEST).float())
