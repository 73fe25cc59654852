"""Triton device functions that encode values, bit for bit as `halfbyte.numerics`.

A row is 16 consecutive values of a head in two halves, `low` and `high`, float32 `[rows, 8]`: a
block of NVFP4, half a block of MXFP4. A thread holds a row, so that block maxima and packing need
no exchange between threads. The results are int32 words in memory order, `[rows, 2]` of 4-bit
codes or `[rows, 4]` of bytes, and the byte of the block scale of each row.

How the bits of the oracle are reproduced with few instructions per value:
- **Division** by a shared divisor is multiplication by two parts (`encode_floats.py`).
- **E2M1.** The magnitude of code c is where F(y) = min(2y, y + 2, y/2 + 4) equals c; F increases,
  and takes the ties between codes to the ties between integers. So the code is F(y) rounded to the
  nearest integer, ties to even. Floats are 1 apart below 2^24 and 2 apart beyond, so that the
  bits of 2y + 2^24 - 4 count the codes of the first two lines and those of y + 2^24 the codes of
  the third: a fused multiply-add, a sum and their minimum.
- **Block scales in E4M3** by adding and taking away a power of two whose last place is E4M3's.
- **FP8** by integer arithmetic, since there are no casts before SM89 nor in Triton's interpreter.
- **NaN** is propagated explicitly: by default, min and max on a GPU drop it.
- Launch with `enable_fp_fusion=False`: products that the oracle rounds must be rounded.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode_floats import (
    bits_of,
    can_share,
    clamp,
    float_of,
    multiply_two_parts,
    reciprocal_of,
    set_sign,
)

# A single global: Triton checks each global that a kernel uses in every launch.
TOP = tl.constexpr(2.0**24)


@triton.jit
def encode_e4m3_magnitude(bits):
    """E4M3 (int32) of the bits of float32 in 0 .. 448, to nearest even."""
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The ulp of 2^14 is the smallest subnormal, 2^-9.
    subnormal = bits_of(float_of(bits) + 16384.0) - 0x46800000
    return tl.where(bits < 0x3C800000, subnormal, normal)  # 2^-6


@triton.jit
def encode_e5m2_magnitude(bits):
    """E5M2 (int32) of the bits of float32 in 0 .. 57344, to nearest even."""
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    # The ulp of 2^7 is the smallest subnormal, 2^-16.
    subnormal = bits_of(float_of(bits) + 128.0) - 0x43000000
    return tl.where(bits < 0x38800000, subnormal, normal)  # 2^-14


@triton.jit
def encode_fp8_values(x, sign, kind: tl.constexpr):
    """FP8 bytes (int32) of x (float32 within the format's range) with the sign of `sign`.

    NaN is 0x7F.
    """
    bits = bits_of(x) & 0x7FFFFFFF
    code = encode_e4m3_magnitude(bits) if kind == "fp8_e4m3" else encode_e5m2_magnitude(bits)
    return tl.where(x == x, code | ((bits_of(sign) >> 24) & 0x80), 0x7F)


@triton.jit
def _pack_bytes(codes):
    """Words `[rows, 2]` of bytes `[rows, 8]` (int32)."""
    by_word = tl.reshape(codes, (codes.shape[0], 2, 4))
    return tl.sum(by_word << (tl.arange(0, 4) * 8)[None, None, :], axis=2)


@triton.jit
def encode_fp8(low, high, scale, kind: tl.constexpr, largest: tl.constexpr):
    """Words `[rows, 4]` of `x / scale` in FP8.

    Args:
        low, high: float32 `[rows, 8]`.
        scale: float32 scalar.
        kind: `fp8_e4m3` or `fp8_e5m2`.
        largest: its largest finite value.
    """
    if can_share(scale):
        limit = largest * scale
        r, r_low = reciprocal_of(scale)
        y_low = multiply_two_parts(clamp(low, limit), r, r_low)
        y_high = multiply_two_parts(clamp(high, limit), r, r_low)
    else:
        y_low = clamp(tl.div_rn(low, scale), largest)
        y_high = clamp(tl.div_rn(high, scale), largest)
        low, high = y_low, y_high
    # The two parts of a quotient of 0 may differ in sign, so signs come from the values.
    low_words = _pack_bytes(encode_fp8_values(y_low, low, kind))
    words = tl.join(low_words, _pack_bytes(encode_fp8_values(y_high, high, kind)))
    return tl.reshape(tl.permute(words, (0, 2, 1)), (low.shape[0], 4))


@triton.jit
def round_e2m1(y):
    """A float32 whose bits are 0x4B7FFFFC + the code of y in 0 .. 6."""
    return tl.minimum(tl.fma(y, 2.0, TOP - 4.0), y + TOP)


@triton.jit
def pack_codes(rounded, x):
    """Words `[rows]` of what `round_e2m1` gave and the signs of x, both `[rows, 8]`."""
    codes = set_sign(bits_of(rounded), x)
    # The constant upper bits sum to 0x3F3BBBBC over the eight shifts, modulo 2^32.
    return tl.sum(codes << (tl.arange(0, 8) * 4)[None, :], axis=1) - 0x3F3BBBBC


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(low, high):
    """Largest magnitude of each row; NaN where the row holds one."""
    both = _larger(tl.abs(low), tl.abs(high))
    even, odd = tl.split(tl.reshape(both, (low.shape[0], 4, 2)))
    even, odd = tl.split(tl.reshape(_larger(even, odd), (low.shape[0], 2, 2)))
    even, odd = tl.split(_larger(even, odd))
    return _larger(even, odd)


@triton.jit
def pairwise_sum(x):
    """Sum of each row of `[rows, 8]`, neighbours first."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (x.shape[0], 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _squared_error(x, rounded, s, g):
    """Sum of `((q * s) * g - |x|)^2` over each row, for a block scale s."""
    # An E2M1 code shifted left by 22 bits is a float32 of its value times 2^-126.
    q = float_of((bits_of(rounded) + 4) << 22) * 2.0**126
    error = (q * s[:, None]) * g - tl.abs(x)
    return pairwise_sum(error * error)


@triton.jit
def _nvfp4_magnitudes(x, divisor, shared: tl.constexpr):
    """`round_e2m1` of |x / divisor|, `divisor` being `[rows]`."""
    if shared:
        r, r_low = reciprocal_of(divisor)
        clamped = tl.minimum(tl.abs(x), (6.0 * divisor)[:, None])
        y = multiply_two_parts(clamped, r[:, None], r_low[:, None])
    else:
        y = tl.abs(tl.div_rn(x, divisor[:, None]))
        y = tl.where(y == y, tl.minimum(y, 6.0), 0.0)  # 0 / 0 is 0
    return round_e2m1(y)


@triton.jit
def _nvfp4_candidate(low, high, amax, g, target: tl.constexpr, shared: tl.constexpr):
    """Block scales that map the maximum to target: as E4M3, as float32, and both halves rounded.

    Scales are at least 2^-9: a scale of 0 would lose the block.
    """
    if shared:
        r, r_low = reciprocal_of(target * g)
        ratio = multiply_two_parts(tl.minimum(amax, 448.0 * (target * g)), r, r_low)
    else:
        ratio = tl.div_rn(amax, target * g)
        # Infinity saturates even where the divisor is infinite, and an odd scale has no sign.
        ratio = tl.where(amax == float("inf"), amax, ratio)
        ratio = tl.where(ratio < 0, 0.0, ratio)
        ratio = tl.minimum(ratio, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding and subtracting `power` rounds to E4M3: the ulp of
    # 2^20 * max(2^-6, 2^floor(log2 ratio)) is E4M3's step.
    power = float_of(tl.maximum(bits_of(ratio) & 0x7F800000, 0x3C800000)) * 2.0**20
    s = tl.maximum((ratio + power) - power, 2.0**-9)
    code = bits_of(s * 2.0**-120) >> 20
    if not shared:
        # A global scale of NaN.
        code = tl.where(ratio == ratio, code, 0x7F)
        s = tl.where(ratio == ratio, s, ratio)
    divisor = s * g
    low_rounded = _nvfp4_magnitudes(low, divisor, shared)
    return code, s, low_rounded, _nvfp4_magnitudes(high, divisor, shared)


@triton.jit
def _nvfp4_blocks(low, high, amax, g, four_over_six: tl.constexpr, shared: tl.constexpr):
    """Scale and rounded halves of the better candidate."""
    code, s, low_rounded, high_rounded = _nvfp4_candidate(low, high, amax, g, 6.0, shared)
    if four_over_six:
        code4, s4, low4, high4 = _nvfp4_candidate(low, high, amax, g, 4.0, shared)
        error = _squared_error(low, low_rounded, s, g) + _squared_error(high, high_rounded, s, g)
        error4 = _squared_error(low, low4, s4, g) + _squared_error(high, high4, s4, g)
        take4 = error4 < error
        code = tl.where(take4, code4, code)
        low_rounded = tl.where(take4[:, None], low4, low_rounded)
        high_rounded = tl.where(take4[:, None], high4, high_rounded)
    return code, low_rounded, high_rounded


@triton.jit
def encode_nvfp4(low, high, g, four_over_six: tl.constexpr):
    """NVFP4 blocks of rows.

    Args:
        low, high: float32 `[rows, 8]`.
        g: global scale, float32 scalar.
        four_over_six: the recipe; else amax6.

    Returns:
        Words `[rows, 2]` and E4M3 scales `[rows]`, int32.
    """
    amax = amax_of(low, high)
    if can_share(g):
        code, low_rounded, high_rounded = _nvfp4_blocks(low, high, amax, g, four_over_six, True)
    else:
        code, low_rounded, high_rounded = _nvfp4_blocks(low, high, amax, g, four_over_six, False)
    words = tl.join(pack_codes(low_rounded, low), pack_codes(high_rounded, high))
    is_number = amax == amax
    code = tl.where(amax == 0, 0, tl.where(is_number, code, 0x7F))
    return tl.where(is_number[:, None], words, 0), code


@triton.jit
def encode_block_fp4(low, high, kind: tl.constexpr):
    """Rows in E2M1 with E8M0 scales.

    Args:
        low, high: float32 `[rows, 8]`.
        kind: `fp4_block16`, or `mxfp4`, where two rows make a block.

    Returns:
        Words `[rows, 2]` and the scale of each row's block `[rows]`, int32.
    """
    # Bits of magnitudes compare as integers, NaN above infinity.
    bits = bits_of(amax_of(low, high))
    if kind == "mxfp4":
        pairs = tl.reshape(bits, (bits.shape[0] // 2, 2))
        both = tl.broadcast_to(tl.max(pairs, axis=1)[:, None], pairs.shape)
        bits = tl.reshape(both, bits.shape)
    has_nan = bits > 0x7F800000
    # floor(log2 amax) - 2, or ceil(log2(amax / 6)); subnormals have the smallest scale anyway.
    scale = (bits >> 23) - 2
    if kind == "fp4_block16":
        scale += tl.where((bits & 0x7FFFFF) > 0x400000, 1, 0)
    # 6 * 2^125 is the largest that float32 holds; infinity ends there, too.
    scale = tl.minimum(tl.maximum(scale, 0), 252)
    reciprocal = float_of((254 - scale) << 23)[:, None]
    low_rounded = round_e2m1(tl.minimum(tl.abs(low) * reciprocal, 6.0))
    high_rounded = round_e2m1(tl.minimum(tl.abs(high) * reciprocal, 6.0))
    words = tl.join(pack_codes(low_rounded, low), pack_codes(high_rounded, high))
    return tl.where(has_nan[:, None], 0, words), tl.where(has_nan, 0xFF, scale)
