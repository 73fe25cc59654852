"""Matmuls of attention tiles for `kernels.py`: query rows with K, weights with V.

4-bit formats unpack to separate tensors of even and odd values (`kv_tiles`). Queries that multiply
them, and accumulators of V, are split likewise.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.dot_operands import dot_precision
from halfbyte.kernels.formats.kv_tiles import load_fp4, load_plain


@triton.jit
def _power_of_two_scaled(query, amax):
    """Rows times a power of two that brings their `amax` to [2^14, 2^15), and its inverse."""
    exponent = (amax.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    field = tl.minimum(268 - exponent, 253)  # 127 + 14 - (exponent - 127); both stay normal
    factor = (field << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - field) << 23).to(tl.float32, bitcast=True)
    return query * factor[:, None], inverse


@triton.jit
def load_query(query, row_live, k: tl.constexpr, k_operand: tl.constexpr, scaled: tl.constexpr):
    """Rows of the query at the pointers `query`, as operands: even values and odd ones.

    Where K is not of four bits both are all values. Where `scaled`, rows are multiplied by powers
    of two, whose inverses are the third result.
    """
    dims = tl.arange(0, k.padded)[None, :]
    inverse = tl.full(row_live.shape, 1.0, tl.float32)
    if k.fp4:
        pairs = row_live[:, None] & (2 * dims < k.head_size)
        even = tl.load(query + 2 * dims, mask=pairs, other=0.0).to(tl.float32)
        odd = tl.load(query + 2 * dims + 1, mask=pairs, other=0.0).to(tl.float32)
        if scaled:
            amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
            even, inverse = _power_of_two_scaled(even, amax)
            odd, inverse = _power_of_two_scaled(odd, amax)
        even = even.to(k_operand)
        odd = odd.to(k_operand)
    else:
        even = tl.load(query + dims, mask=row_live[:, None] & (dims < k.head_size), other=0.0)
        if scaled:
            even = even.to(tl.float32)
            even, inverse = _power_of_two_scaled(even, tl.max(tl.abs(even), 1))
        even = even.to(k_operand)
        odd = even
    return even, odd, inverse


@triton.jit
def dot_keys(
    even,
    odd,
    pages,
    page_stride,
    page,
    slots,
    kv_head,
    live,
    k: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    pin: tl.constexpr,
    casts: tl.constexpr,
):
    """Dot products of query rows (`load_query`) and a tile of keys."""
    precision: tl.constexpr = dot_precision(operand)
    scores = tl.full((even.shape[0], slots.shape[0]), 0.0, tl.float32)
    if k.fp4:
        k_even, k_odd = load_fp4(
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            head=kv_head,
            live=live,
            side=k,
            operand=operand,
            ptx=ptx,
            pin=pin,
        )
        scores = tl.dot(even, tl.trans(k_even), scores, input_precision=precision)
        scores = tl.dot(odd, tl.trans(k_odd), scores, input_precision=precision)
    else:
        keys = load_plain(
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            head=kv_head,
            live=live,
            side=k,
            operand=operand,
            ptx=ptx,
            pin=pin,
            casts=casts,
        )
        scores = tl.dot(even, tl.trans(keys), scores, input_precision=precision)
    return scores


@triton.jit
def add_values(
    acc,
    acc_odd,
    rescale,
    weights,
    pages,
    page_stride,
    page,
    slots,
    kv_head,
    live,
    v: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    pin: tl.constexpr,
    casts: tl.constexpr,
):
    """`acc * rescale + weights @ V` of a tile; for 4-bit formats, even and odd values apart."""
    precision: tl.constexpr = dot_precision(operand)
    acc *= rescale[:, None]
    if v.fp4:
        acc_odd *= rescale[:, None]
        even, odd = load_fp4(
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            head=kv_head,
            live=live,
            side=v,
            operand=operand,
            ptx=ptx,
            pin=pin,
        )
        acc = tl.dot(weights, even, acc, input_precision=precision)
        acc_odd = tl.dot(weights, odd, acc_odd, input_precision=precision)
    else:
        values = load_plain(
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            head=kv_head,
            live=live,
            side=v,
            operand=operand,
            ptx=ptx,
            pin=pin,
            casts=casts,
        )
        acc = tl.dot(weights, values, acc, input_precision=precision)
    return acc, acc_odd
