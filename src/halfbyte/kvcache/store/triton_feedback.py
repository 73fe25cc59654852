"""Triton device functions of error feedback: blocks of 16 channels, one thread per token.

A program's scratch memory has the values to round as `[head_size, tokens]`. A block first gathers
the errors of all earlier channels, in order, which is bit-equal to propagating each error at once.
Then it replaces its values with its own errors. The 16 steps of a block need no exchange between
threads, and factors are the same for all threads.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode_floats import bits_of, float_of
from halfbyte.kernels.formats.encode_weighted import nearest_e2m1, ratio_of, scale_of_byte


@triton.jit
def _two_columns(column, tokens: tl.constexpr):
    """Channels 0 and 4 of the tokens at `column` (pointers): `[tokens, 2]`, all in their thread."""
    return tl.join(tl.load(column), tl.load(column + 4 * tokens))


@triton.jit
def _four_columns(column, tokens: tl.constexpr):
    return tl.join(_two_columns(column, tokens), _two_columns(column + 2 * tokens, tokens))


@triton.jit
def eight_columns(column, tokens: tl.constexpr):
    """Channels 0 up to 8: `[tokens, 8]`."""
    columns = tl.join(_four_columns(column, tokens), _four_columns(column + tokens, tokens))
    return tl.reshape(columns, (tokens, 8))


@triton.jit
def _column_of(x, c: tl.constexpr):
    """Column `c` of `[tokens, 8]`: the XOR of all columns, of which the others are set to zero.
    Triton compiles this to selects."""
    is_it = (tl.arange(0, 8) == c)[None, :]
    return float_of(tl.xor_sum(tl.where(is_it, bits_of(x), 0), axis=1))


@triton.jit
def gather(low, high, column, factor, begin, tokens: tl.constexpr, size: tl.constexpr):
    """A block at channel `begin`, less the errors of the channels before it."""
    eight = tl.arange(0, 8)
    factor += begin
    for i in tl.range(0, begin, loop_unroll_factor=4):
        error = tl.load(column + i * tokens)[:, None]
        low -= error * tl.load(factor + i * size + eight)[None, :]
        high -= error * tl.load(factor + i * size + 8 + eight)[None, :]
    return low, high


@triton.jit
def round_in_turn(low, high, scales, g, column, factor, tokens: tl.constexpr, size: tl.constexpr):
    """Words `[tokens, 2]` of a block; writes its channels' errors to `column`.

    Args:
        scales: bytes `[tokens]`, at least 1.
        column: pointers to the block's first channel of each token.
        factor: pointer to its row and column.
    """
    eight = tl.arange(0, 8)
    d = tl.where(scales == 0x7F, float("nan"), scale_of_byte(scales) * g)
    r = tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    first = tl.zeros_like(scales)
    second = tl.zeros_like(scales)
    for c in tl.static_range(16):
        x = _column_of(low if c < 8 else high, c % 8)
        below = x < 0
        v = nearest_e2m1(ratio_of(x, r))
        error = x - tl.where(below, -v, v) * d
        error = tl.where(tl.abs(error) < float("inf"), error, 0.0)
        tl.store(column + c * tokens, error)
        # Factors of the channels before are 0.
        if c < 8:
            low -= error[:, None] * tl.load(factor + c * size + eight)[None, :]
        high -= error[:, None] * tl.load(factor + c * size + 8 + eight)[None, :]
        code = tl.minimum(v + v, tl.minimum(v + 2.0, v * 0.5 + 4.0)).to(tl.int32)
        code = (code | tl.where(below, 8, 0)) << (c % 8 * 4)
        if c < 8:
            first |= code
        else:
            second |= code
    return tl.join(first, second)
