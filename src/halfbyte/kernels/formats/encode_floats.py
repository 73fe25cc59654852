"""Triton device functions on float32 for `encode.py`: bits, casts, rounded arithmetic.

**Division.** Values with the same divisor d share its reciprocal, in two parts: r = 1/d, and its
error l = (h + h^2) * r with h = 1 - d * r. Then x / d is x * r + x * l in one fused multiply-add.
Next to every tie of E2M1, E4M3 and E5M2 the result is on the same side as that of a true division,
for all 2^23 significands of d (`l = h * r` fails for one of them). This requires that r is
correctly rounded (`_reciprocal`) and that nothing overflows or underflows: values are clamped
first, and global scales beyond 2^-40 .. 2^40 use the true division."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def bits_of(x):
    """The bits of float32, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """float32 of bits (int32)."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x):
    """float16, bfloat16 or float32 widened; by bits, as the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        wide = float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def to_bfloat16(x):
    """float32 to nearest even; NaN is 0x7FC0."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x == x, rounded, 0x7FC0)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_float16(x):
    """float32 to nearest even, saturating; NaN stays."""
    x = tl.where(x > 65504.0, 65504.0, x)
    x = tl.where(x < -65504.0, -65504.0, x)
    return x.to(tl.float16)


@triton.jit
def fused_multiply_add(x, y, z):
    """x * y + z, rounded once; the interpreter's own `fma` rounds twice."""
    if INTERPRETED:
        exact = tl.cast(x, tl.float64) * tl.cast(y, tl.float64) + tl.cast(z, tl.float64)
        result = exact.to(tl.float32)
    else:
        result = tl.fma(x, y, z)
    return result


@triton.jit
def can_share(scale):
    """Whether divisions by a global scale, times a block scale, may share a reciprocal."""
    return (scale >= 2.0**-40) & (scale <= 2.0**40)  # false for NaN


@triton.jit
def _reciprocal(x):
    """1 / x, rounded correctly, for x of 2^-49 .. 2^49.

    On a GPU the instructions of `rcp.rn` for such x (as disassembled for SM80 to SM120): an
    approximation and a Newton step, without the checks for other x.
    """
    if INTERPRETED:
        result = tl.div_rn(1.0, x)
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        result = tl.fma(result, tl.fma(x * -1.0, result, 1.0), result)
    return result


@triton.jit
def reciprocal_of(divisor):
    """1 / divisor as an unevaluated sum of two float32."""
    high = _reciprocal(divisor)
    # Negation would compile to a subtraction from 0.
    missing = fused_multiply_add(divisor * -1.0, high, 1.0)
    return high, fused_multiply_add(missing, missing, missing) * high


@triton.jit
def multiply_two_parts(x, high, low):
    """x * (high + low), rounded once, except for the last bits of x * low."""
    return fused_multiply_add(x, high, x * low)


@triton.jit
def clamp(x, limit):
    """x within +-limit; NaN stays."""
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def set_sign(code, x):
    """Set the sign bit (add 8) of an E2M1 code (int32) where x < 0."""
    if INTERPRETED:
        result = code + tl.where(x < 0, 8, 0)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .pred below;
            setp.lt.f32 below, $2, 0f00000000;
            mov.b32 $0, $1;
            @below add.s32 $0, $0, 8;
            }""",
            "=r,r,r",
            [code, x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return result
