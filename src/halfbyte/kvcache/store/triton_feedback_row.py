"""Triton device functions of error feedback for small batches: one warp per token and head of K.

`triton_feedback` uses one thread per token, so a launch with one token takes as long as one with a
thousand. Here the threads of a warp split channels (when propagating an error) and candidates of a
block scale. The sixteen values of a block are scalars, replicated in all threads, so that steps
need no exchange.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode import encode_e4m3_magnitude
from halfbyte.kernels.formats.encode_floats import bits_of, float_of
from halfbyte.kernels.formats.encode_weighted import (
    NUM_CANDIDATES,
    candidate_byte,
    nearest_e2m1,
    ratio_of,
    scale_of_byte,
)


@triton.jit
def _largest_of(xs):
    """Largest magnitude of 16 scalars; NaN where there is one."""
    amax = tl.abs(xs[0])
    for c in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(xs[c]), propagate_nan=tl.PropagateNan.ALL)
    return amax


@triton.jit
def _best_scale(xs, amax, weights, g):
    """As `best_scales`, of 16 scalars: a byte (int32), 0x7F for NaN. A thread for each candidate.

    Args:
        weights: pointer to those of the block.
    """
    ratio = tl.where(amax == float("inf"), amax, tl.div_rn(amax, 6.0 * g))
    start = encode_e4m3_magnitude(bits_of(tl.where(ratio > 0, tl.minimum(ratio, 448.0), 0.0)))
    n = tl.arange(0, NUM_CANDIDATES)
    byte = candidate_byte(start, n)
    s = scale_of_byte(byte)
    r = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s * g)
    sums = ()
    for c in tl.static_range(16):
        t = ratio_of(xs[c], r)
        off = nearest_e2m1(t) - t
        sums = sums + (off * off * tl.load(weights + c),)  # noqa: RUF005 - Triton's tuples
    for level in tl.static_range(4):
        halved = ()
        for i in tl.static_range(8 >> level):
            halved = halved + (sums[2 * i] + sums[2 * i + 1],)  # noqa: RUF005
        sums = halved
    error = sums[0] * s * s
    # Comparisons with NaN are false, so the first candidate stays.
    error = tl.where(error == error, error, tl.where(n == 0, float("-inf"), float("inf")))
    chosen = tl.min(tl.where(error == tl.min(error, 0), n, NUM_CANDIDATES), 0)
    best = tl.sum(tl.where(n == chosen, byte, 0), 0)
    return tl.where(ratio == ratio, best, 0x7F)


@triton.jit
def round_block(y, channel, b, factor, weights, g, size: tl.constexpr):
    """Round block b of a token's K.

    Args:
        y: float32 `[channels]`, what is to be rounded, less the errors of the blocks before.
        channel: int32, of each value of y; those from `size` on are padding.
        factor: pointer to the head's factors.
        weights: pointer to the head's weights.

    Returns:
        y, less this block's errors; both words of codes, and the scale's byte: int32.
    """
    begin = b * 16
    bits = bits_of(y)
    xs = ()
    for c in tl.static_range(16):
        x = float_of(tl.xor_sum(tl.where(channel == begin + c, bits, 0), axis=0))
        xs = xs + (x,)  # noqa: RUF005
    amax = _largest_of(xs)
    scale = _best_scale(xs, amax, weights + begin, g)
    d = tl.where(scale == 0x7F, float("nan"), scale_of_byte(scale) * g)
    r = tl.div_rn(1.0, d)
    factor += begin * size
    errors = ()
    first = 0
    second = 0
    for c in tl.static_range(16):
        x = xs[c]
        for m in tl.static_range(c):
            x -= errors[m] * tl.load(factor + m * size + begin + c)
        below = x < 0
        v = nearest_e2m1(ratio_of(x, r))
        error = x - tl.where(below, -v, v) * d
        error = tl.where(tl.abs(error) < float("inf"), error, 0.0)
        errors = errors + (error,)  # noqa: RUF005
        # Factors of the channels before are 0.
        y -= error * tl.load(factor + c * size + channel, mask=channel < size, other=0.0)
        code = tl.minimum(v + v, tl.minimum(v + 2.0, v * 0.5 + 4.0)).to(tl.int32)
        code = (code | tl.where(below, 8, 0)) << (c % 8 * 4)
        if c < 8:
            first |= code
        else:
            second |= code
    is_zero = amax == 0
    is_empty = is_zero | (scale == 0x7F)
    first = tl.where(is_empty, 0, first)
    second = tl.where(is_empty, 0, second)
    return y, first, second, tl.where(is_zero, 0, scale)
