"""Kernel that unpacks tokens of the cache into contiguous workspaces, for every format.

For prefill: keys are unpacked once and then read by dense matmuls. The values are those of
`halfbyte.kvcache.read_tokens`, rounded once. A program unpacks K or V of one head and consecutive
tokens of one sequence. A thread unpacks eight values at a time and stores 16 bytes, without
exchange between threads.

Rotated K (`kvcache/transform.py`) is rotated back here: K has fewer heads than the queries, which
dense kernels can then read unchanged. A byte unpacks to an even and an odd channel, which the first
butterfly of the Hadamard transform pairs anyway:

    K[2m]     = sum over a of  (even[a] + odd[a]) H[a, m]
    K[2m + 1] = sum over a of  (even[a] - odd[a]) H[a, m]

where H is the Hadamard matrix (+-1) of half the size. Both values of a pair share a block scale, so
their sum and difference are exact in float16, and so are products with +-1; H's sums are float32.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.decode import (
    e2m1_to_float32,
    e4m3_to_float16,
    e8m0_to_float32,
    fp8_to_float16,
    nvfp4_to_float16,
    spread,
)
from halfbyte.kernels.formats.kv_tiles import load_fp4_bytes, load_plain_rows, pinned


@triton.jit
def _mean(tables, segment, head, columns, size: tl.constexpr):
    """The mean that centring subtracted from K of a head: of one segment, or of one per row."""
    cos, sin, mean, partner_mean = tables
    in_segment = segment * size + columns
    in_head = head * size + columns
    mask = columns < size
    direct = tl.load(cos + in_segment, mask=mask, other=0.0) * tl.load(
        mean + in_head, mask=mask, other=0.0
    )
    return direct + tl.load(sin + in_segment, mask=mask, other=0.0) * tl.load(
        partner_mean + in_head, mask=mask, other=0.0
    )


@triton.jit
def _unpack_side(
    out,
    out_token,
    out_head,
    pages,
    page_stride,
    page,
    slots,
    rows,
    tokens,
    head,
    live,
    factor,
    matrix,
    tables,
    num_segments,
    constant,
    has_constant,
    side: tl.constexpr,
    rotated: tl.constexpr,
    segment: tl.constexpr,
    knows_first: tl.constexpr,
    num_tokens: tl.constexpr,
    ptx: tl.constexpr,
):
    """K or V of one head in `slots` of `page`, times `factor`, to `rows` of `out`.

    Args:
        tokens: positions.
        matrix: float16 `[side.padded, side.padded]`, `unpack.half_matrix`; read where `rotated`.
        tables, num_segments: `MeanTables`, of the means that are added where `segment`.
        constant: pointer to the values that replace the first token if it `has_constant`; read
            where `knows_first`.
    """
    if side.fp4:
        packed, scales = load_fp4_bytes(pages, page_stride, page, slots, head, live, side, 4)
        if side.kind == "nvfp4":
            factors = spread(e4m3_to_float16(scales) * 32768.0, side.block)
            even, odd = nvfp4_to_float16(packed, factors, ptx)
            if rotated:
                # Pinned: Triton would otherwise convert single bytes to the matmul's layout.
                even, odd = pinned(even, ptx), pinned(odd, ptx)
                a = tl.arange(0, side.padded)
                h = tl.load(matrix + a[:, None] * side.padded + a[None, :])
                even, odd = tl.dot(even + odd, h), tl.dot(even - odd, h)
            even, odd = even.to(tl.float32), odd.to(tl.float32)
        else:
            factors = spread(e8m0_to_float32(scales), side.block)
            even = e2m1_to_float32(packed) * factors
            odd = e2m1_to_float32(packed >> 4) * factors
        values = tl.reshape(tl.join(even, odd), (num_tokens, 2 * side.padded)) * factor
    else:
        values = load_plain_rows(pages, page_stride, page, slots, head, live, side, 8)
        if side.kind == "fp8_e4m3" or side.kind == "fp8_e5m2":
            kind: tl.constexpr = side.kind  # a plain string cannot be an argument
            values = fp8_to_float16(values, kind, ptx).to(tl.float32) * factor
        values = values.to(tl.float32)
    columns = tl.arange(0, values.shape[1])
    if segment > 0:
        last = num_segments - 1  # later segments use the last mean
        if segment % num_tokens == 0:
            turn = tl.minimum(tl.min(tokens, 0) // segment, last)
            # Pinned: in a matmul's output layout each thread would load many columns.
            values += pinned(_mean(tables, turn, head, columns, side.head_size), ptx)[None, :]
        else:
            turn = tl.minimum(tokens // segment, last)[:, None]
            values += _mean(tables, turn, head, columns[None, :], side.head_size)
    inside = columns < side.head_size
    out += head * out_head + columns
    if knows_first:
        place = out + tl.min(rows, 0) * out_token
        known = tl.load(constant + columns, mask=inside & has_constant, other=0.0)
        tl.store(place, known.to(out.dtype.element_ty), mask=inside & has_constant)
        live &= (tokens > 0) | ~has_constant
    place = out[None, :] + rows[:, None] * out_token
    tl.store(place, values.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


# Addresses of single numbers differ in alignment, which must not trigger recompilation.
@triton.jit(
    do_not_specialize=["table_stride", "num_segments", "begins", "ends", "first_rows"],
)
def unpack_kernel(
    pages,
    tables,
    begins,
    ends,
    first_rows,
    k_global,
    v_global,
    k_out,
    v_out,
    matrix,
    cos,
    sin,
    mean,
    partner_mean,
    first_keys,
    first_values,
    k_factor,
    v_factor,
    page_stride,
    table_stride,
    num_segments,
    k_out_token,
    k_out_head,
    v_out_token,
    v_out_head,
    k: tl.constexpr,
    v: tl.constexpr,
    kv_heads: tl.constexpr,
    k_global_on_device: tl.constexpr,
    v_global_on_device: tl.constexpr,
    rotated: tl.constexpr,
    segment: tl.constexpr,
    knows_first: tl.constexpr,
    mark: tl.constexpr,
    ring: tl.constexpr,
    num_tokens: tl.constexpr,
    ptx: tl.constexpr,
):
    """`num_tokens` tokens of sequence s = `program_id(1)`, from `begins[s]` on or, where K is
    centred, from the multiple of `num_tokens` before it on.

    Args, beside the fields of `AttentionInputs` and `KeyRanges`:
        matrix: see `unpack.half_matrix`; read where K was `rotated`, whose norm is in `k_factor`.
        cos, sin, mean, partner_mean: `MeanTables`, of `num_segments` means; read where `segment`,
            the tokens that share one.
        first_keys, first_values: `[constants, kv_heads, size]`, read where `knows_first`.
    """
    sequence = tl.program_id(1)
    begin = tl.load(begins + sequence)
    first = tl.program_id(0) * num_tokens
    # Aligned, so that segments end at tile boundaries.
    first += begin // num_tokens * num_tokens if segment > 0 else begin
    end = tl.load(ends + sequence)
    if first >= end:
        return
    tokens = first + tl.arange(0, num_tokens)
    live = (tokens >= begin) & (tokens < end)
    tables += sequence.to(tl.int64) * table_stride
    page = tl.load(tables + tokens // k.block_size, mask=live, other=0).to(tl.int64)
    slots = tokens % k.block_size
    in_range = tokens % ring if ring > 0 else tokens - begin
    rows = (tl.load(first_rows + sequence) + in_range).to(tl.int64)
    head = tl.program_id(2) % kv_heads
    has_constant = False
    constant = 0
    if knows_first:
        start = pages + tl.load(tables).to(tl.int64) * page_stride
        # Only if position 0 is requested: pages before the window may have been reused.
        has_start = (first == 0) & (begin == 0)
        scale_byte = tl.load(start + k.scale + head * k.scale_head, mask=has_start, other=0)
        index = tl.load(start + k.data + head * k.data_head, mask=has_start, other=0)
        has_constant = has_start & (scale_byte == mark)
        constant = tl.where(has_constant, index.to(tl.int32), 0) * kv_heads + head
    if tl.program_id(2) < kv_heads:
        if k_global_on_device:
            k_factor *= tl.load(k_global)
        _unpack_side(
            out=k_out,
            out_token=k_out_token,
            out_head=k_out_head,
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            rows=rows,
            tokens=tokens,
            head=head,
            live=live,
            factor=k_factor,
            matrix=matrix,
            tables=(cos, sin, mean, partner_mean),
            num_segments=num_segments,
            constant=first_keys + constant * k.head_size,
            has_constant=has_constant,
            side=k,
            rotated=rotated,
            segment=segment,
            knows_first=knows_first,
            num_tokens=num_tokens,
            ptx=ptx,
        )
    else:
        if v_global_on_device:
            v_factor *= tl.load(v_global)
        _unpack_side(
            out=v_out,
            out_token=v_out_token,
            out_head=v_out_head,
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            rows=rows,
            tokens=tokens,
            head=head,
            live=live,
            factor=v_factor,
            matrix=matrix,
            tables=(cos, sin, mean, partner_mean),
            num_segments=num_segments,
            constant=first_values + constant * v.head_size,
            has_constant=has_constant,
            side=v,
            rotated=False,
            segment=0,
            knows_first=knows_first,
            num_tokens=num_tokens,
            ptx=ptx,
        )
