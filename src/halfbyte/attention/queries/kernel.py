"""Triton kernel that transforms queries to match K changed by a recipe (see the package)."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.dot_operands import dot_precision

_LOG2E = tl.constexpr(1.4426950408889634)
_CHANNELS = tl.constexpr(32)
"""Rows of the Hadamard matrix per matmul."""


@triton.jit
def hadamard_rows(
    first, rows: tl.constexpr, size: tl.constexpr, block: tl.constexpr, operand: tl.constexpr
):
    """Rows `first` on of the matrix of +1 and -1 that rotates heads, `[rows, size]`.

    Args:
        size: of a head, or the power of two above it.
        block: values of a head that are rotated together: zeros elsewhere.
        operand: dtype of the result.
    """
    i = first + tl.arange(0, rows)[:, None]
    j = tl.arange(0, size)[None, :]
    parity = i & j & (block - 1)
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    sign = 1.0 - 2.0 * (parity & 1).to(tl.float32)
    return tl.where(i // block == j // block, sign, 0.0).to(operand)


@triton.jit
def _rotate(
    query,
    out,
    inside,
    head_size: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    norm: tl.constexpr,
    operand: tl.constexpr,
):
    """Heads at the pointers `query`, rotated in float32 and rounded once, to those at `out`."""
    total = tl.full((query.shape[0], padded), 0.0, tl.float32)
    for first in tl.static_range(0, padded, _CHANNELS):
        dims = first + tl.arange(0, _CHANNELS)[None, :]
        x = tl.load(query[:, None] + dims, mask=inside[:, None] & (dims < head_size), other=0.0)
        matrix = hadamard_rows(first, _CHANNELS, padded, block, operand)
        total = tl.dot(x.to(operand), matrix, total, input_precision=dot_precision(operand))
    columns = tl.arange(0, padded)[None, :]
    result = (total * norm).to(out.dtype.element_ty)
    tl.store(out[:, None] + columns, result, mask=inside[:, None] & (columns < head_size))


@triton.jit(do_not_specialize=["num_rows", "num_segments", "bias_stride", "table_stride", "window"])
def transform_kernel(
    query,
    sequences,
    positions,
    tables,
    pages,
    low,
    high,
    cos,
    sin,
    low_mean,
    high_mean,
    first_keys,
    rotated,
    bias,
    first_scores,
    first_indices,
    scale,
    bias_scale,
    cap,
    num_rows,
    num_segments,
    bias_stride,
    table_stride,
    page_stride,
    window,
    query_token,
    query_head,
    k: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    norm: tl.constexpr,
    operand: tl.constexpr,
    pairs: tl.constexpr,
    segment: tl.constexpr,
    knows_first: tl.constexpr,
    mark: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    rows: tl.constexpr,
    segments: tl.constexpr,
):
    """Rows `[program_id(0) * rows, ...)` of the query: a token's head each.

    Programs 0 of the second axis rotate them and look for first tokens; program 1 + i multiplies
    them with the means of segments `[i * segments, ...)`.

    Args, beside those of `transform_queries`:
        low, high, cos, sin, low_mean, high_mean: `PairTables`, of `num_segments` segments; read
            where `pairs`.
        sequences, positions: `QueryPositions`; read where `pairs` or `knows_first`.
        rotated: `[num_rows, head_size]`, written where `block`.
        bias: float32 `[num_rows, bias_stride]`, `q . mean * bias_scale`.
        first_scores, first_indices: float32 and int32 `[num_rows]`, written where `knows_first`.
        scale, cap: of scores, for those of first tokens.
        block: of the rotation; 0 for none.
        pairs: of channels; 0 where K is not centred.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < num_rows
    token = (row // heads).to(tl.int64)
    head = row % heads
    kv_head = head // group
    position = tl.full((rows,), -1, tl.int64)
    if knows_first or pairs > 0:
        position = tl.load(positions + token, mask=inside, other=-1)
    query += token * query_token + head.to(tl.int64) * query_head
    if tl.program_id(1) == 0:
        if block > 0:
            out = rotated + row.to(tl.int64) * k.head_size
            _rotate(query, out, inside, k.head_size, padded, block, norm, operand)
        if knows_first:
            sequence = tl.load(sequences + token, mask=inside, other=-1)
            # Pages of tokens before the window may be another sequence's by now.
            sees_first = sequence >= 0
            if windowed:
                sees_first &= position < window
            table = tables + tl.maximum(sequence, 0).to(tl.int64) * table_stride
            page = tl.load(table, mask=sees_first, other=0).to(tl.int64)
            start = pages + page * page_stride
            scale_byte = tl.load(start + k.scale + kv_head * k.scale_head, mask=sees_first, other=0)
            index = tl.load(start + k.data + kv_head * k.data_head, mask=sees_first, other=0)
            is_marked = sees_first & (scale_byte == mark)
            columns = tl.arange(0, padded)[None, :]
            mask = is_marked[:, None] & (columns < k.head_size)
            constant = index.to(tl.int32) * (heads // group) + kv_head
            keys = tl.load(
                first_keys + (constant * k.head_size)[:, None] + columns, mask=mask, other=0.0
            )
            x = tl.load(query[:, None] + columns, mask=mask, other=0.0)
            score = tl.sum(x.to(tl.float32) * keys.to(tl.float32), 1) * scale
            if capped:
                score = cap - 2.0 * cap / (1.0 + tl.exp2(score * (2.0 * _LOG2E / cap)))
            score = tl.where(is_marked, score * _LOG2E, float("-inf"))
            tl.store(first_scores + row, score, mask=inside)
            tl.store(first_indices + row, tl.where(is_marked, index.to(tl.int32), -1), mask=inside)
    elif pairs > 0:
        at_once: tl.constexpr = pairs if pairs < 32 else 32
        first = (tl.program_id(1) - 1) * segments
        latest = tl.max(position, 0)
        oldest = 0
        if windowed:
            nearest = tl.where(position < 0, 0x7FFFFFFF, position)
            oldest = tl.min(nearest, 0) - window + 1
        if (first * segment <= latest) & ((first + segments) * segment > oldest):
            number = first + tl.arange(0, segments)
            # Later segments have the last mean, as in the store kernels.
            of_table = tl.minimum(number, num_segments - 1)
            mask = inside[:, None]
            score = tl.full((rows, segments), 0.0, tl.float32)
            for begin in tl.range(0, pairs, at_once):
                pair = begin + tl.arange(0, at_once)[None, :]
                q_low = tl.load(query[:, None] + tl.load(low + pair), mask=mask, other=0.0)
                q_high = tl.load(query[:, None] + tl.load(high + pair), mask=mask, other=0.0)
                q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
                of_head = (kv_head * pairs)[:, None] + pair
                m_low = tl.load(low_mean + of_head, mask=mask, other=0.0)
                m_high = tl.load(high_mean + of_head, mask=mask, other=0.0)
                of_segment = (of_table * pairs)[:, None] + pair
                cosines = tl.trans(tl.load(cos + of_segment))
                sines = tl.trans(tl.load(sin + of_segment))
                along = q_low * m_low + q_high * m_high
                across = q_low * m_high - q_high * m_low
                score = tl.dot(along, cosines, score, input_precision="tf32x3")
                score = tl.dot(across, sines, score, input_precision="tf32x3")
            place = bias + row.to(tl.int64)[:, None] * bias_stride + number[None, :]
            tl.store(place, score * bias_scale, mask=mask & (number < bias_stride)[None, :])
