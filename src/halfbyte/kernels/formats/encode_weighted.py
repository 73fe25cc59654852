"""Triton device functions for weighted rounding, bit for bit as `numerics.weighted_rounding`.

Rows of 16 values in two halves and words of codes are those of `encode.py`; launch with
`enable_fp_fusion=False`.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode import (
    amax_of,
    encode_e4m3_magnitude,
    pack_codes,
    pairwise_sum,
    round_e2m1,
)
from halfbyte.kernels.formats.encode_floats import bits_of, float_of
from halfbyte.numerics import weighted_rounding

_STEPS = tl.constexpr(weighted_rounding.CANDIDATES)
NUM_CANDIDATES = tl.constexpr(len(weighted_rounding.CANDIDATES))


@triton.jit
def ratio_of(x, r):
    """|x * r|, or 0 if not a number."""
    t = tl.abs(x * r)
    return tl.where(t == t, t, 0.0)


@triton.jit
def nearest_e2m1(t):
    """The E2M1 value nearest to a magnitude, ties to the even code.

    The ulp of 2^22 * max(1, power of two below t) is the step between E2M1 values.
    """
    clamped = tl.minimum(t, 6.0)
    power = float_of(tl.maximum(bits_of(clamped) & 0x7F800000, 0x3F800000) + (22 << 23))
    return (clamped + power) - power


@triton.jit
def scale_of_byte(byte):
    """Block scales (float32) of their bytes in E4M3 (int32, 0 up to 126)."""
    return float_of(byte << 20) * 2.0**120


@triton.jit
def candidate_byte(start, n):
    """The byte of candidate n (int32) for a block scale, `start` being that of amax6."""
    step = n * 0
    for i in tl.static_range(NUM_CANDIDATES):
        step = tl.where(n == i, _STEPS[i], step)
    return tl.minimum(tl.maximum(start + step, 1), 126)


@triton.jit
def _error(x, weights, r):
    """Sum of `weight * (E2M1(t) - t)^2` over each row of `[rows, 8]`, t = |x * r|."""
    t = ratio_of(x, r[:, None])
    off = nearest_e2m1(t) - t
    return pairwise_sum(off * off * weights)


@triton.jit
def best_scales(low, high, low_weights, high_weights, g):
    """Bytes (int32 `[rows]`) of the block scales with the smallest error; 0x7F for NaN.

    Args:
        low, high: float32 `[rows, 8]`.
        low_weights, high_weights: float32 `[rows, 8]` or `[1, 8]`.
        g: global scale, float32 scalar.
    """
    amax = amax_of(low, high)
    ratio = tl.where(amax == float("inf"), amax, tl.div_rn(amax, 6.0 * g))
    start = encode_e4m3_magnitude(bits_of(tl.where(ratio > 0, tl.minimum(ratio, 448.0), 0.0)))
    best = start
    best_error = tl.zeros_like(ratio)
    for n in tl.range(0, NUM_CANDIDATES):
        byte = candidate_byte(start, n)
        s = scale_of_byte(byte)
        r = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * g)
        error = (_error(low, low_weights, r) + _error(high, high_weights, r)) * s * s
        better = (error < best_error) | (n == 0)
        best = tl.where(better, byte, best)
        best_error = tl.where(better, error, best_error)
    return tl.where(ratio == ratio, best, 0x7F)


@triton.jit
def encode_weighted(low, high, low_weights, high_weights, g):
    """NVFP4 blocks of rows, each value rounded alone.

    Args: as of `best_scales`.

    Returns:
        Words `[rows, 2]` and E4M3 scales `[rows]`, int32.
    """
    scales = best_scales(low, high, low_weights, high_weights, g)
    r = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scale_of_byte(scales) * g)[:, None]
    low_rounded = round_e2m1(tl.minimum(ratio_of(low, r), 6.0))
    high_rounded = round_e2m1(tl.minimum(ratio_of(high, r), 6.0))
    words = tl.join(pack_codes(low_rounded, low), pack_codes(high_rounded, high))
    is_zero = amax_of(low, high) == 0
    is_empty = is_zero | (scales == 0x7F)
    return tl.where(is_empty[:, None], 0, words), tl.where(is_zero, 0, scales)
