"""Triton device functions that decode the cache formats, bit for bit as `numerics`.

Results are exact up to a power of two, which callers fold into another factor:

    fp8_e5m2              the upper byte of a float16
    fp8_e4m3              bits moved into a float16: the value times 2^-8
    nvfp4                 E2M1 bits moved into a float16 (times 2^-14), times the block's E4M3 scale
                          (times 2^7): the product, of at most six significant bits, times 2^-7
    fp4_block16, mxfp4    E2M1 bits moved into a bfloat16 (times 2^-126), times 2^120 and the
                          block's power of two: the product times 2^-6

Decoding uses integer arithmetic only, for GPUs without E4M3 casts (before SM89) and for Triton's
interpreter. `ptx` selects the same arithmetic on four packed bytes at a time, in half as many
instructions. Subnormals become subnormals of the wider type; NaN stays NaN.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

# In the sources below, `prmt` puts bytes 0 and 1 (2 and 3) of a word into the upper or lower
# bytes of two halves, with zeros beside them.
FP8_E4M3_PTX = tl.constexpr("""{
    .reg .b32 w<2>, s<2>, t<2>;
    prmt.b32 w0, $2, 0, 0x1404;
    prmt.b32 w1, $2, 0, 0x3424;
    and.b32 s0, w0, 0x80008000;
    and.b32 s1, w1, 0x80008000;
    shr.u32 t0, w0, 1;
    shr.u32 t1, w1, 1;
    and.b32 t0, t0, 0x3F803F80;
    and.b32 t1, t1, 0x3F803F80;
    or.b32 s0, s0, t0;
    or.b32 s1, s1, t1;
    add.u32 t0, t0, 0x00800080;
    add.u32 t1, t1, 0x00800080;
    and.b32 t0, t0, 0x40004000;
    and.b32 t1, t1, 0x40004000;
    or.b32 $0, s0, t0;
    or.b32 $1, s1, t1;
}""")
FP8_E5M2_PTX = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")
# Even values in $0 and $1, odd ones in $2 and $3; bytes in $4, their scales in $5 and $6.
NVFP4_PTX = tl.constexpr("""{
    .reg .b32 even, odd, t, w<4>;
    shl.b32 even, $4, 4;
    and.b32 even, even, 0x80808080;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x0E0E0E0E;
    or.b32 even, even, t;
    and.b32 odd, $4, 0x80808080;
    shr.u32 t, $4, 3;
    and.b32 t, t, 0x0E0E0E0E;
    or.b32 odd, odd, t;
    prmt.b32 w0, even, 0, 0x1404;
    prmt.b32 w1, even, 0, 0x3424;
    prmt.b32 w2, odd, 0, 0x1404;
    prmt.b32 w3, odd, 0, 0x3424;
    mul.rn.f16x2 $0, w0, $5;
    mul.rn.f16x2 $1, w1, $6;
    mul.rn.f16x2 $2, w2, $5;
    mul.rn.f16x2 $3, w3, $6;
}""")
# As above for bfloat16, whose exponent starts one bit lower; `fma` because SM80 has no `mul`.
# 0x7B80 is 2^120 and 0x8000 is -0, which changes no product.
E8M0_FP4_PTX = tl.constexpr("""{
    .reg .b32 w<2>, s<4>, t<4>, one, none;
    mov.b32 one, 0x7B807B80;
    mov.b32 none, 0x80008000;
    prmt.b32 w0, $4, 0, 0x4140;
    prmt.b32 w1, $4, 0, 0x4342;
    shl.b32 s0, w0, 12;
    shl.b32 s1, w1, 12;
    shl.b32 s2, w0, 8;
    shl.b32 s3, w1, 8;
    and.b32 s0, s0, 0x80008000;
    and.b32 s1, s1, 0x80008000;
    and.b32 s2, s2, 0x80008000;
    and.b32 s3, s3, 0x80008000;
    shl.b32 t0, w0, 6;
    shl.b32 t1, w1, 6;
    shl.b32 t2, w0, 2;
    shl.b32 t3, w1, 2;
    and.b32 t0, t0, 0x01C001C0;
    and.b32 t1, t1, 0x01C001C0;
    and.b32 t2, t2, 0x01C001C0;
    and.b32 t3, t3, 0x01C001C0;
    or.b32 t0, t0, s0;
    or.b32 t1, t1, s1;
    or.b32 t2, t2, s2;
    or.b32 t3, t3, s3;
    fma.rn.bf16x2 t0, t0, one, none;
    fma.rn.bf16x2 t1, t1, one, none;
    fma.rn.bf16x2 t2, t2, one, none;
    fma.rn.bf16x2 t3, t3, one, none;
    fma.rn.bf16x2 $0, t0, $5, none;
    fma.rn.bf16x2 $1, t1, $6, none;
    fma.rn.bf16x2 $2, t2, $5, none;
    fma.rn.bf16x2 $3, t3, $6, none;
}""")


@triton.jit
def e4m3_to_float16(byte):
    """float16 values times 2^-8 of E4M3 bytes (uint8); NaN stays NaN."""
    bits = byte.to(tl.uint16)
    magnitude = (bits & 0x7F) << 7
    # Only NaN, all ones, carries into bit 14, which then completes a float16's NaN exponent.
    nan = (magnitude + 0x80) & 0x4000
    return (((bits & 0x80) << 8) | magnitude | nan).to(tl.float16, bitcast=True)


@triton.jit
def e8m0_to_float32(byte):
    """float32 powers of two of E8M0 bytes (uint8); 0xFF is NaN, 0 is the subnormal 2^-127."""
    bits = byte.to(tl.uint32) << 23
    bits = tl.where(byte == 0, 0x00400000, bits)
    return tl.where(byte == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float32(code):
    """float32 values of E2M1 codes, the lower four bits of uint8."""
    bits = code.to(tl.uint32)
    # Exponent and mantissa at the end of float32's exponent: the value times 2^-126.
    bits = ((bits & 0x8) << 28) | ((bits & 0x7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def fp8_to_float16(byte, kind: tl.constexpr, ptx: tl.constexpr):
    """float16 values of `fp8_e4m3` (times 2^-8) or `fp8_e5m2` bytes (uint8)."""
    if ptx:
        source: tl.constexpr = FP8_E4M3_PTX if kind == "fp8_e4m3" else FP8_E5M2_PTX
        return tl.inline_asm_elementwise(
            source, "=r,=r,r", [byte], dtype=tl.float16, is_pure=True, pack=4
        )
    if kind == "fp8_e4m3":
        return e4m3_to_float16(byte)
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def nvfp4_to_float16(packed, factors, ptx: tl.constexpr):
    """Even and odd values times 2^-7 of E2M1 pairs (uint8) and scales (float16, times 2^7)."""
    if ptx:
        return tl.inline_asm_elementwise(
            NVFP4_PTX,
            "=r,=r,=r,=r,r,r,r",
            [packed, factors],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    bits = packed.to(tl.uint16)
    even = (((bits & 0x08) << 12) | ((bits & 0x07) << 9)).to(tl.float16, bitcast=True)
    odd = (((bits & 0x80) << 8) | ((bits & 0x70) << 5)).to(tl.float16, bitcast=True)
    return even * factors, odd * factors


@triton.jit
def e8m0_fp4_to_bfloat16(packed, factors):
    """Even and odd values times 2^-6 of E2M1 pairs (uint8) and their scales (bfloat16)."""
    return tl.inline_asm_elementwise(
        E8M0_FP4_PTX,
        "=r,=r,=r,=r,r,r,r",
        [packed, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def spread(factors, width: tl.constexpr):
    """`[tokens, n * width]`, each of the factors `[tokens, n]` repeated `width` times."""
    tokens: tl.constexpr = factors.shape[0]
    blocks: tl.constexpr = factors.shape[1]
    repeated = tl.broadcast_to(factors[:, :, None], (tokens, blocks, width))
    return tl.reshape(repeated, (tokens, blocks * width))
