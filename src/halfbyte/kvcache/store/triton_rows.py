"""Triton device functions of the store kernel: rows of K or V, from a model's tensors to pages.

A row is 16 values of a head of a token (the last of a head may be shorter), numbered as in a
contiguous `[tokens, heads, rows per head]`.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import triton
import triton.language as tl

from halfbyte.kernels.formats.encode import encode_block_fp4, encode_fp8, encode_nvfp4
from halfbyte.kernels.formats.encode_floats import to_bfloat16, to_float16, to_float32
from halfbyte.kernels.formats.encode_weighted import encode_weighted
from halfbyte.layouts import PageLayout

ROW = 16
"""Values of a row; a literal in kernels, because Triton checks every global in each launch."""


class Side(NamedTuple):
    """Geometry of K or V that a kernel is compiled for; strides in bytes."""

    kind: str
    max_value: float
    """Of the format's elements."""
    head_size: int
    num_heads: int
    block_size: int
    data_token: int
    data_head: int
    scale_token: int
    scale_head: int
    sm100: bool
    aligned: bool
    """Whether every row's codes begin at a multiple of four bytes."""


def side_of(layout: PageLayout, side: str, pages_aligned: bool) -> tuple[Side, tuple[int, int]]:
    """K's (`k`) or V's (`v`) geometry, and the offsets of its data and scales in a page.

    Args:
        pages_aligned: whether pages begin at multiples of four bytes.
    """
    regions = {region.name: region for region in layout.regions}
    data, scale = regions[f"{side}_data"], regions.get(f"{side}_scale")
    head_size = layout.head_size if side == "k" else layout.head_size_v
    in_words = data.offset % 4 == data.token_stride % 4 == data.head_stride % 4 == 0
    dtype = layout.k_dtype if side == "k" else layout.v_dtype
    geometry = Side(
        kind=dtype.value,
        max_value=dtype.kv_format.max_value,
        head_size=head_size,
        num_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        data_token=data.token_stride,
        data_head=data.head_stride,
        scale_token=scale.token_stride if scale else 0,
        scale_head=scale.head_stride if scale else 0,
        sm100=side == "v" and layout.v_scale_layout == "sm100",
        aligned=pages_aligned and in_words and head_size % ROW == 0,
    )
    return geometry, (data.offset, scale.offset if scale else 0)


@triton.jit
def load_half(x, element, stride, inside, side: tl.constexpr):
    """Eight values of every row, from `element` of the head at `x` on; 0 where there are none."""
    elements = element[:, None] + tl.arange(0, 8)[None, :]
    mask = inside[:, None]
    if side.head_size % 16 != 0:
        mask = mask & (elements < side.head_size)
    return tl.load(x[:, None] + elements.to(tl.int64) * stride, mask=mask, other=0.0)


@triton.jit
def _store_half(elements, element, x, keep, side: tl.constexpr):
    """Eight floats of every row, to `element` of the head at `elements` (pointers) on."""
    columns = element[:, None] + tl.arange(0, 8)[None, :]
    mask = keep[:, None]
    if side.head_size % 16 != 0:
        mask = mask & (columns < side.head_size)
    tl.store(elements[:, None] + columns, x, mask=mask)


@triton.jit
def _store_floats(data, part, low, high, keep, side: tl.constexpr):
    """Rows in a float format, to the heads at `data` (pointers to bytes)."""
    if side.kind == "float32":
        low, high = to_float32(low), to_float32(high)
        elements = data.to(tl.pointer_type(tl.float32))
    elif side.kind == "float16":
        if low.dtype != tl.float16:
            low, high = to_float16(to_float32(low)), to_float16(to_float32(high))
        elements = data.to(tl.pointer_type(tl.float16))
    else:
        if low.dtype != tl.bfloat16:
            low, high = to_bfloat16(to_float32(low)), to_bfloat16(to_float32(high))
        elements = data.to(tl.pointer_type(tl.bfloat16))
    _store_half(elements, part * 16, low, keep, side)
    _store_half(elements, part * 16 + 8, high, keep, side)


@triton.jit
def store_words(data, part, words, keep, side: tl.constexpr):
    """Words `[rows, n]` of codes, to the heads at `data` (pointers to bytes)."""
    num_words: tl.constexpr = words.shape[1]
    mask = keep[:, None]
    if side.aligned:
        columns = (part * num_words)[:, None] + tl.arange(0, num_words)[None, :]
        elements = data.to(tl.pointer_type(tl.int32))
        tl.store(elements[:, None] + columns, words, mask=mask)
    else:
        columns = (part * (4 * num_words))[:, None] + tl.arange(0, 4 * num_words)[None, :]
        codes = words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
        codes = tl.reshape(codes, (words.shape[0], 4 * num_words)).to(tl.uint8)
        if side.head_size % 16 != 0:
            mask = mask & (columns < side.head_size)  # 8-bit formats, where a code is a byte
        tl.store(data[:, None] + columns, codes, mask=mask)


@triton.jit
def store_scales(start, offset, head, part, scales, keep, side: tl.constexpr):
    """The byte of every row's block, to the scales at `start`; two rows are an mxfp4 block."""
    per_head: tl.constexpr = side.head_size // 16
    line, column = offset, part
    if side.kind == "mxfp4":
        column = part // 2
        keep = keep & (part % 2 == 0)
    if side.sm100:
        line = offset // 4 * 4 + part // (per_head // 4)
        column = part % (per_head // 4) * 4 + offset % 4
    position = line * side.scale_token + head * side.scale_head + column
    tl.store(start + position, scales.to(tl.uint8), mask=keep)


@triton.jit
def place_of_row(rows: tl.constexpr, side: tl.constexpr):
    """Token, head, and part of the head of each of the program's rows."""
    per_head: tl.constexpr = (side.head_size + 15) // 16
    per_token: tl.constexpr = side.num_heads * per_head
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.uint32)
    return row // per_token, row // per_head % side.num_heads, row % per_head


@triton.jit
def load_rows(
    x,
    stride_token,
    stride_head,
    stride,
    token,
    head,
    part,
    inside,
    side: tl.constexpr,
    dense: tl.constexpr,
):
    """Halves `[rows, 8]` of K or V, in its dtype; `dense` where heads lie side by side."""
    per_head: tl.constexpr = (side.head_size + 15) // 16
    x += token.to(tl.int64) * stride_token
    if dense:
        row = head * per_head + part
        low = load_half(x, row * 16, 1, inside, side)
        high = load_half(x, row * 16 + 8, 1, inside, side)
    else:
        x += head.to(tl.int64) * stride_head
        low = load_half(x, part * 16, stride, inside, side)
        high = load_half(x, part * 16 + 8, stride, inside, side)
    return low, high


@triton.jit
def slot_of_token(slots, slot_stride, token, inside, capacity, side: tl.constexpr):
    """Page and offset in it of each row's token, and whether its slot is valid."""
    slot = tl.load(slots + token.to(tl.int64) * slot_stride, mask=inside, other=-1).to(tl.uint64)
    keep = slot < capacity
    if capacity.dtype == tl.int32:
        slot = slot.to(tl.uint32)
    page = (slot // side.block_size).to(tl.int64)
    return page, (slot % side.block_size).to(tl.uint32), keep


@triton.jit
def store_side(
    x,
    stride_token,
    stride_head,
    stride,
    scale,
    data_offset,
    scale_offset,
    pages,
    page_stride,
    slots,
    slot_stride,
    num_slots,
    capacity,
    side: tl.constexpr,
    dense: tl.constexpr,
    scale_on_device: tl.constexpr,
    rows: tl.constexpr,
    weights=None,
):
    """K or V of the program's rows.

    Args:
        weights: float32 `[heads, size]` of errors, by which block scales of NVFP4 are chosen; None
            to choose them as the format does.
    """
    kind: tl.constexpr = side.kind
    token, head, part = place_of_row(rows, side)
    inside = token < num_slots
    low, high = load_rows(
        x=x,
        stride_token=stride_token,
        stride_head=stride_head,
        stride=stride,
        token=token,
        head=head,
        part=part,
        inside=inside,
        side=side,
        dense=dense,
    )
    # Loaded after the values, so that their loads do not wait for it.
    page, offset, keep = slot_of_token(slots, slot_stride, token, inside, capacity, side)
    start = pages + page * page_stride
    data = start + (data_offset + offset * side.data_token + head * side.data_head)
    if kind == "float32" or kind == "float16" or kind == "bfloat16":
        _store_floats(data, part, low, high, keep, side)
    else:
        low, high = to_float32(low), to_float32(high)
        g = tl.load(scale) if scale_on_device else tl.cast(scale, tl.float32)
        if kind == "fp8_e4m3" or kind == "fp8_e5m2":
            largest: tl.constexpr = side.max_value
            words = encode_fp8(low, high, g, kind, largest)
        else:
            if weights is not None:
                weights += head.to(tl.int64) * side.head_size
                w_low = load_half(weights, part * 16, 1, inside, side)
                w_high = load_half(weights, part * 16 + 8, 1, inside, side)
                words, scales = encode_weighted(low, high, w_low, w_high, g)
            elif kind == "nvfp4" or kind == "nvfp4_4over6":
                words, scales = encode_nvfp4(low, high, g, kind == "nvfp4_4over6")
            else:
                words, scales = encode_block_fp4(low, high, kind)
            store_scales(start + scale_offset, offset, head, part, scales, keep, side)
        store_words(data, part, words, keep, side)
