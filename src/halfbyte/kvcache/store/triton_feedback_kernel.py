"""Store kernel for recipes with error feedback of K; scales may be weighted.

Like `triton_transform`, bit-equal to `numerics.weighted_rounding`. A program has K of one head and
`tokens` tokens. It centres and rotates by rows, then passes them through scratch memory to one
thread per token (`triton_feedback`), or with few tokens one warp per token (`triton_feedback_row`).
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode import amax_of, encode_nvfp4
from halfbyte.kernels.formats.encode_floats import to_float32
from halfbyte.kernels.formats.encode_weighted import best_scales
from halfbyte.kernels.runtime.triton_overlap import wait_for_previous
from halfbyte.kvcache.recent_kernel import write_heads
from halfbyte.kvcache.store.triton_feedback import eight_columns, gather, round_in_turn
from halfbyte.kvcache.store.triton_feedback_row import round_block
from halfbyte.kvcache.store.triton_rows import (
    load_rows,
    slot_of_token,
    store_scales,
    store_side,
    store_words,
)
from halfbyte.kvcache.store.triton_transform import (
    find_first,
    mark_first,
    rotate_rows,
    subtract_mean,
)


@triton.jit(do_not_specialize=["num_slots", "capacity", "num_first", "num_segments", "num_kept"])
def store_feedback_kernel(
    key,
    value,
    pages,
    slots,
    positions,
    k_scale,
    v_scale,
    cos,
    sin,
    mean,
    partner_mean,
    first_keys,
    first_values,
    k_weights,
    v_weights,
    ring_keys,
    ring_values,
    ring_rows,
    ring_owners,
    ring_slots,
    feedback,
    scratch,
    num_slots,
    capacity,
    num_first,
    num_segments,
    num_kept,
    page_stride,
    slot_stride,
    key_stride_token,
    key_stride_head,
    key_stride,
    value_stride_token,
    value_stride_head,
    value_stride,
    k_side: tl.constexpr,
    v_side: tl.constexpr,
    k_offsets: tl.constexpr,
    v_offsets: tl.constexpr,
    k_dense: tl.constexpr,
    v_dense: tl.constexpr,
    k_scale_on_device: tl.constexpr,
    v_scale_on_device: tl.constexpr,
    centred: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
    norm: tl.constexpr,
    knows_first: tl.constexpr,
    mark: tl.constexpr,
    tolerance: tl.constexpr,
    weighted: tl.constexpr,
    weighted_v: tl.constexpr,
    ring_size: tl.constexpr,
    pairs: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    parts: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    """As `store_transformed_kernel`; programs 0 of the second axis take K, 1 V, and 2 rings.

    Args, beside those of that kernel:
        feedback: float32 `[heads, head_size, head_size]`.
        scratch: float32 `[programs of K, head_size, tokens]`.
        parts: blocks of a head, rounded up to a power of two.
        tokens: per program of K; 1 only where K is weighted.
        rows: of 16 values: of K that are centred and rotated at once, at most `parts * tokens`;
            of V per program.
    """
    wait_for_previous(overlaps)
    # The same in `store_transformed_kernel`: only a kernel itself can return early.
    if ring_size > 0:  # noqa: SIM102 - known at compile time
        if tl.program_id(1) == 2:
            places = (ring_rows, ring_owners, ring_slots, num_kept)
            heads: tl.constexpr = k_side.num_heads
            side = (key, key_stride_token, key_stride_head, key_stride, ring_keys)
            write_heads(side, places, pairs, heads, ring_size, k_side.head_size, padded)
            side = (value, value_stride_token, value_stride_head, value_stride, ring_values)
            write_heads(side, places, pairs, heads, ring_size, v_side.head_size, padded_v)
            return
    if tl.program_id(1) == 1:
        store_side(
            x=value,
            stride_token=value_stride_token,
            stride_head=value_stride_head,
            stride=value_stride,
            scale=v_scale,
            data_offset=v_offsets[0],
            scale_offset=v_offsets[1],
            pages=pages,
            page_stride=page_stride,
            slots=slots,
            slot_stride=slot_stride,
            num_slots=num_slots,
            capacity=capacity,
            side=v_side,
            dense=v_dense,
            scale_on_device=v_scale_on_device,
            rows=rows,
            weights=v_weights if weighted_v else None,
        )
        return
    size: tl.constexpr = k_side.head_size
    program = tl.program_id(0)
    # Programs of one head are adjacent, to share its factors in L2.
    tiles = tl.cdiv(num_slots, tokens)
    if program >= tiles * k_side.num_heads:
        return
    tile, one_head = program % tiles, program // tiles
    scratch += program.to(tl.int64) * (size * tokens)
    row = tl.arange(0, rows)
    for begin in tl.range(0, tokens, rows // parts):
        within, part = begin + row // parts, (row % parts).to(tl.uint32)
        token = (tile * tokens + within).to(tl.uint32)
        head = tl.zeros_like(token) + one_head.to(tl.uint32)
        inside = (token < num_slots) & (part < size // 16)
        low, high = load_rows(
            x=key,
            stride_token=key_stride_token,
            stride_head=key_stride_head,
            stride=key_stride,
            token=token,
            head=head,
            part=part,
            inside=inside,
            side=k_side,
            dense=k_dense,
        )
        low, high = to_float32(low), to_float32(high)
        if centred:
            position = tl.load(positions + token.to(tl.int64), mask=inside, other=1)
            # Padding may have any position; it is not stored.
            turn = tl.minimum(tl.maximum(position // segment, 0), num_segments - 1)
            low, high = subtract_mean(
                low=low,
                high=high,
                cos=cos,
                sin=sin,
                mean=mean,
                partner_mean=partner_mean,
                segment=turn,
                head=head,
                part=part,
                inside=inside,
                side=k_side,
            )
        if block > 0:
            low, high = rotate_rows(low, high, block, norm)
        place = (scratch + (part * 16).to(tl.int32) * tokens + within)[:, None]
        place += (tl.arange(0, 8) * tokens)[None, :]
        is_part = (part < size // 16)[:, None]
        tl.store(place, low, mask=is_part)
        tl.store(place + 8 * tokens, high, mask=is_part)
    tl.debug_barrier()
    within = tl.arange(0, tokens)
    token = (tile * tokens + within).to(tl.uint32)
    head = tl.zeros_like(token) + one_head.to(tl.uint32)
    inside = token < num_slots
    page, offset, keep = slot_of_token(slots, slot_stride, token, inside, capacity, k_side)
    found = tl.full(token.shape, -1, tl.int32)
    if knows_first:
        position = tl.load(positions + token.to(tl.int64), mask=inside, other=1)
        at_start = keep & (position == 0)
        if tl.max(at_start.to(tl.int32), 0) > 0:
            found = find_first(
                key=key,
                key_stride_token=key_stride_token,
                key_stride_head=key_stride_head,
                key_stride=key_stride,
                value=value,
                value_stride_token=value_stride_token,
                value_stride_head=value_stride_head,
                value_stride=value_stride,
                first_keys=first_keys,
                first_values=first_values,
                num_first=num_first,
                token=token,
                head=head,
                at_start=at_start,
                tolerance=tolerance,
                k_side=k_side,
                v_side=v_side,
            )
    g = tl.load(k_scale) if k_scale_on_device else tl.cast(k_scale, tl.float32)
    feedback += one_head.to(tl.int64) * (size * size)
    k_weights += one_head.to(tl.int64) * size
    column = scratch + within
    start = pages + page * page_stride
    data = start + (k_offsets[0] + offset * k_side.data_token + head * k_side.data_head)
    if tokens == 1:
        channel = tl.arange(0, parts * 16)
        y = tl.load(scratch + channel, mask=channel < size, other=0.0)
        for b in tl.range(0, size // 16):
            y, first, second, scale = round_block(y, channel, b, feedback, k_weights, g, size)
            scales = tl.full((1,), 0, tl.int32) + scale
            words = tl.join(tl.zeros_like(scales) + first, tl.zeros_like(scales) + second)
            part = tl.full((1,), b, tl.uint32)
            if knows_first:
                words, scales = mark_first(words, scales, found, part, mark)
            store_scales(start + k_offsets[1], offset, head, part, scales, keep, k_side)
            store_words(data, part, words, keep, k_side)
        return
    eight = tl.arange(0, 8)
    for b in tl.range(0, size // 16):
        here = column + b * 16 * tokens
        low, high = gather(
            eight_columns(here, tokens),
            eight_columns(here + 8 * tokens, tokens),
            column,
            feedback,
            b * 16,
            tokens,
            size,
        )
        if weighted:
            scales = best_scales(
                low,
                high,
                tl.load(k_weights + b * 16 + eight)[None, :],
                tl.load(k_weights + b * 16 + 8 + eight)[None, :],
                g,
            )
        else:
            _, scales = encode_nvfp4(low, high, g, k_side.kind == "nvfp4_4over6")
        is_zero = amax_of(low, high) == 0
        words = round_in_turn(
            low,
            high,
            tl.maximum(scales, 1),
            g,
            here,
            feedback + b * 16 * (size + 1),
            tokens,
            size,
        )
        scales = tl.where(is_zero, 0, scales)
        words = tl.where((is_zero | (scales == 0x7F))[:, None], 0, words)
        part = tl.full(token.shape, b, tl.uint32)
        if knows_first:
            words, scales = mark_first(words, scales, found, part, mark)
        store_scales(start + k_offsets[1], offset, head, part, scales, keep, k_side)
        store_words(data, part, words, keep, k_side)
