"""Store kernel for K that a recipe changes: subtracts the mean, rotates, marks the first token.

Like `triton_kernel.store_kernel`, bit-equal to the reference (`kvcache/transform.py` has the
definitions). A thread has 16 values of a head: butterflies with stride up to 8 are in one thread,
larger strides exchange between two threads. Only programs with a token at position 0 branch to the
comparison with the constants. Recipes with error feedback have `triton_feedback_kernel`.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode import encode_nvfp4
from halfbyte.kernels.formats.encode_floats import bits_of, float_of, to_float32
from halfbyte.kernels.formats.encode_weighted import encode_weighted
from halfbyte.kernels.runtime.triton_overlap import wait_for_previous
from halfbyte.kvcache.recent_kernel import write_heads
from halfbyte.kvcache.store.triton_rows import (
    load_half,
    load_rows,
    place_of_row,
    slot_of_token,
    store_scales,
    store_side,
    store_words,
)


@triton.jit
def _butterfly_in_thread(x, stride: tl.constexpr):
    """Butterflies of columns of `[rows, 8]` that are `stride` apart."""
    rows: tl.constexpr = x.shape[0]
    pairs = tl.permute(tl.reshape(x, (rows, 4 // stride, 2, stride)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    y = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(y, (rows, 8))


@triton.jit
def _butterfly_of_rows(x, stride: tl.constexpr):
    """Butterflies of rows of `[rows, 8]` that are `stride` apart."""
    rows: tl.constexpr = x.shape[0]
    pairs = tl.reshape(x, (rows // (2 * stride), 2, stride * 8))
    # The XOR of two rows turns each into the other: one exchange, and the compiler cancels repeated
    # XORs.
    bits = bits_of(pairs)
    other = float_of(bits ^ tl.xor_sum(bits, axis=1)[:, None, :])
    sign = tl.where((tl.arange(0, 2) == 1)[None, :, None], -1.0, 1.0)
    return tl.reshape(tl.fma(pairs, sign, other), (rows, 8))


@triton.jit
def rotate_rows(low, high, block: tl.constexpr, norm: tl.constexpr):
    """Hadamard transform of heads with contiguous rows.

    Args:
        low, high: float32 `[rows, 8]`.
        block: values that are transformed together, a power of two from 16 on.
        norm: float32 of `block ** -0.5`.
    """
    stride: tl.constexpr = 1
    for i in tl.static_range(3):
        low = _butterfly_in_thread(low, stride << i)
        high = _butterfly_in_thread(high, stride << i)
    both = low + high
    high = low - high
    low = both
    for i in tl.static_range(5):
        if 32 << i <= block:
            low = _butterfly_of_rows(low, stride << i)
            high = _butterfly_of_rows(high, stride << i)
    return low * norm, high * norm


@triton.jit
def subtract_mean(
    low, high, cos, sin, mean, partner_mean, segment, head, part, inside, side: tl.constexpr
):
    """K minus the mean of its segment; products are rounded before their sum."""
    size: tl.constexpr = side.head_size
    cos += segment * size
    sin += segment * size
    mean += head.to(tl.int64) * size
    partner_mean += head.to(tl.int64) * size
    at = part * 16
    low -= load_half(cos, at, 1, inside, side) * load_half(mean, at, 1, inside, side) + load_half(
        sin, at, 1, inside, side
    ) * load_half(partner_mean, at, 1, inside, side)
    at += 8
    high -= load_half(cos, at, 1, inside, side) * load_half(mean, at, 1, inside, side) + load_half(
        sin, at, 1, inside, side
    ) * load_half(partner_mean, at, 1, inside, side)
    return low, high


@triton.jit
def _largest(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_constant(
    x, stride_token, stride_head, stride, constants, token, head, inside, tolerance, side
):
    """Whether K or V of each row's head is a constant: bool `[rows]`.

    Args:
        constants: pointer to K or V of one first token, `[heads, head_size]`.
    """
    x += token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    constants += head.to(tl.int64) * side.head_size
    distance = tl.full(token.shape, 0.0, tl.float32)
    size = tl.full(token.shape, 0.0, tl.float32)
    for half in tl.range(0, (side.head_size + 7) // 8):
        element = tl.full(token.shape, 0, tl.int32) + half * 8
        values = to_float32(load_half(x, element, stride, inside, side))
        expected = to_float32(load_half(constants, element, 1, inside, side))
        distance = _largest(distance, tl.max(tl.abs(values - expected), 1))
        distance = tl.where(tl.max((values != values).to(tl.int32), 1) > 0, float("nan"), distance)
        size = _largest(size, tl.max(tl.abs(expected), 1))
    return distance <= tolerance * size


@triton.jit
def find_first(
    key,
    key_stride_token,
    key_stride_head,
    key_stride,
    value,
    value_stride_token,
    value_stride_head,
    value_stride,
    first_keys,
    first_values,
    num_first,
    token,
    head,
    at_start,
    tolerance,
    k_side: tl.constexpr,
    v_side: tl.constexpr,
):
    """Which constant each row's K and V are: int32 `[rows]`, -1 for none.

    Args:
        at_start: bool `[rows]`, of tokens at position 0.
    """
    found = tl.full(token.shape, -1, tl.int32)
    for i in tl.range(0, num_first):
        index = num_first - 1 - i  # the first of equals
        same = is_constant(
            x=key,
            stride_token=key_stride_token,
            stride_head=key_stride_head,
            stride=key_stride,
            constants=first_keys + index * (k_side.num_heads * k_side.head_size),
            token=token,
            head=head,
            inside=at_start,
            tolerance=tolerance,
            side=k_side,
        ) & is_constant(
            x=value,
            stride_token=value_stride_token,
            stride_head=value_stride_head,
            stride=value_stride,
            constants=first_values + index * (v_side.num_heads * v_side.head_size),
            token=token,
            head=head,
            inside=at_start,
            tolerance=tolerance,
            side=v_side,
        )
        found = tl.where(at_start & same, index, found)
    return found


@triton.jit
def mark_first(words, scales, found, part, mark: tl.constexpr):
    """Words `[rows, 2]` and scales `[rows]` of K, with those that mark a first token."""
    marked = found >= 0
    is_word = (part == 0)[:, None] & (tl.arange(0, 2) == 0)[None, :]
    words = tl.where(marked[:, None], tl.where(is_word, found[:, None], 0), words)
    return words, tl.where(marked, tl.where(part == 0, mark, 0), scales)


@triton.jit(do_not_specialize=["num_slots", "capacity", "num_first", "num_segments", "num_kept"])
def store_transformed_kernel(
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
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    """As `store_kernel`, for K in NVFP4; programs 2 of the second axis write to rings.

    Args, beside those of `store_kernel`:
        positions: int64 `[num_slots]`.
        cos, sin: float32 `[num_segments, head_size]`, read where `centred`.
        mean, partner_mean: float32 `[heads, head_size]`, of each channel and of the one that RoPE
            turns it with.
        first_keys, first_values: `[num_first, heads, size]`, read where `knows_first`.
        k_weights, v_weights: float32 `[heads, size]` of errors, by which block scales are chosen;
            read where `weighted` and `weighted_v`.
        ring_keys, ring_values, ring_rows, ring_owners, ring_slots: `RingSlots`, of `num_kept`
            tokens; read where there is a program 2.
        block: of the rotation; 0 for none.
        ring_size: slots of a ring; 0 for none.
        pairs: of a token and a head, that a program copies.
    """
    wait_for_previous(overlaps)
    # The same in `store_feedback_kernel`: only a kernel itself can return early.
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
    token, head, part = place_of_row(rows, k_side)
    inside = token < num_slots
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
    position = tl.load(positions + token.to(tl.int64), mask=inside, other=1)
    page, offset, keep = slot_of_token(slots, slot_stride, token, inside, capacity, k_side)
    if centred:
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
    g = tl.load(k_scale) if k_scale_on_device else tl.cast(k_scale, tl.float32)
    if weighted:
        k_weights += head.to(tl.int64) * k_side.head_size
        low_weights = load_half(k_weights, part * 16, 1, inside, k_side)
        high_weights = load_half(k_weights, part * 16 + 8, 1, inside, k_side)
        words, scales = encode_weighted(low, high, low_weights, high_weights, g)
    else:
        words, scales = encode_nvfp4(low, high, g, k_side.kind == "nvfp4_4over6")
    if knows_first:
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
            words, scales = mark_first(words, scales, found, part, mark)
    start = pages + page * page_stride
    data = start + (k_offsets[0] + offset * k_side.data_token + head * k_side.data_head)
    store_scales(start + k_offsets[1], offset, head, part, scales, keep, k_side)
    store_words(data, part, words, keep, k_side)
