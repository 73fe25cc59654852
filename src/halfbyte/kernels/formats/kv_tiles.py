"""Tiles of packed K or V as matmul operands, for Triton kernels that read pages.

A tile is `[tokens, values of one head]`, not yet multiplied by the global scale and by a power of
two (`operand_shift`): callers multiply scores or outputs by both. Four-bit formats give two tiles,
of the even and the odd values of each byte, because a dot product does not depend on the order of
its terms. Slots that are not `live` read as zeros, scales included: 0 times a stale NaN is NaN."""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.formats.decode import (
    e2m1_to_float32,
    e4m3_to_float16,
    e8m0_fp4_to_bfloat16,
    e8m0_to_float32,
    fp8_to_float16,
    nvfp4_to_float16,
    spread,
)
from halfbyte.layouts import KVCacheDType, PageLayout, page_stride
from halfbyte.layouts.formats import KV_FORMATS


class SideGeometry(NamedTuple):
    """Position of K or V in a page (constexpr of kernels); offsets and strides in bytes."""

    kind: str
    """`KVFormat.triton_kind`: `nvfp4` for all recipes."""
    fp4: bool
    block: int
    """Bytes of codes that share a block scale; 0 where there are none."""
    head_size: int
    padded: int
    """Columns of a tile, a power of two: bytes of four-bit formats, values of the others."""
    block_size: int
    data: int
    data_token: int
    data_head: int
    scale: int
    scale_token: int
    scale_head: int
    sm100: bool
    """Whether block scales are in the `sm100` order."""


def side_geometry(layout: PageLayout, side: str) -> SideGeometry:
    """Geometry of K (`k`) or V (`v`)."""
    regions = {region.name: region for region in layout.regions}
    data, scale = regions[f"{side}_data"], regions.get(f"{side}_scale")
    dtype = layout.k_dtype if side == "k" else layout.v_dtype
    head_size = layout.head_size if side == "k" else layout.head_size_v
    columns = head_size // 2 if scale else head_size
    row = dtype.kv_format
    assert row.triton_kind is not None, f"Triton kernels do not know {dtype}"
    return SideGeometry(
        kind=row.triton_kind,
        fp4=scale is not None,
        block=(row.block_size or 0) * row.bits // 8,
        head_size=head_size,
        padded=max(16, 1 << (columns - 1).bit_length()),  # min size of a matmul operand
        block_size=layout.block_size,
        data=data.offset,
        data_token=data.token_stride,
        data_head=data.head_stride,
        scale=scale.offset if scale else 0,
        scale_token=scale.token_stride if scale else 0,
        scale_head=scale.head_stride if scale else 0,
        sm100=side == "v" and layout.v_scale_layout == "sm100",
    )


def operand_shift(kind: str, casts: bool) -> int:
    """Operands of a format are divided by 2 to this power (`casts` as for `load_plain`)."""
    return 0 if kind == "fp8_e4m3" and casts else KV_FORMATS[kind].shift


def page_stride_of(pages: torch.Tensor, layout: PageLayout) -> int:
    """Bytes from page to page.

    Raises:
        ValueError: pages that are not aligned as the layout's 16- or 32-bit formats need.
    """
    layout.check_alignment(pages)
    return page_stride(pages)


def scale_factor(
    scale: float | torch.Tensor, dtype: KVCacheDType, device: torch.device
) -> tuple[float, torch.Tensor | None]:
    """A global scale as a float, or as 1 and a device tensor; 1 for formats without one."""
    if not dtype.has_global_scale:
        return 1.0, None
    if isinstance(scale, torch.Tensor) and scale.device == device:
        return 1.0, scale.float()
    return float(scale), None


@triton.jit
def pinned(operand, pin: tl.constexpr):
    """Identity that keeps values in the layout in which they were computed.

    Triton otherwise converts bytes to the matmul's layout before decoding, with one shared memory
    load per byte. Inline assembly with side effects prevents that; the `mov` is optimized away.
    """
    if pin:
        pack: tl.constexpr = 32 // operand.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [operand], dtype=operand.dtype, is_pure=False, pack=pack
        )
    return operand


@triton.jit
def _load_columns(
    rows, live, width: tl.constexpr, padded: tl.constexpr, contiguous: tl.constexpr = 0
):
    """`[tokens, padded]` elements from pointers `rows [tokens]` on.

    Zeros past `width` and in tokens that are not `live`. A thread loads `contiguous` elements at a
    time; 0 for 16 bytes.
    """
    columns = tl.arange(0, padded)
    if contiguous > 0:
        columns = tl.max_contiguous(columns, contiguous)
    mask = live[:, None]
    if width != padded:
        mask = mask & (columns < width)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def _load_sm100_scales(
    rows, slots, live, side: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):
    """As `_load_columns` in the `sm100` order (see `layouts.scale_layouts.v_scale_position`).

    `rows` point to slot 0 of each token's page.
    """
    quarter: tl.constexpr = width // 4
    block = tl.arange(0, padded)[None, :]
    token = slots[:, None]
    row = 4 * (token // 4) + block // quarter
    column = 4 * (block % quarter) + token % 4
    pointers = rows[:, None] + row * side.scale_token + column
    return tl.load(pointers, mask=live[:, None] & (block < width), other=0)


@triton.jit
def load_fp4_bytes(
    pages, page_stride, page, slots, head, live, side: tl.constexpr, contiguous: tl.constexpr = 0
):
    """Bytes `[tokens, side.padded]` of a four-bit format and its scale bytes `[tokens, blocks]`.

    Args:
        pages: uint8 pointer to page 0.
        page_stride: bytes from page to page.
        page: int64 `[tokens]` or a scalar, the page of each token.
        slots: int32 `[tokens]`, the slot of each token in its page.
        head: KV head, a scalar.
        live: bool `[tokens]`; others read as zeros.
        side: a `SideGeometry`.
        contiguous: bytes per load of a thread; 0 for 16.
    """
    width: tl.constexpr = side.head_size // 2
    block: tl.constexpr = side.block
    starts = page * page_stride + slots * 0
    rows = pages + side.data + head * side.data_head + (starts + slots * side.data_token)
    packed = _load_columns(rows, live, width, side.padded, contiguous)
    scales = pages + side.scale + head * side.scale_head
    blocks: tl.constexpr = side.padded // block
    if side.sm100:
        scale_bytes = _load_sm100_scales(scales + starts, slots, live, side, width // block, blocks)
    else:
        rows = scales + (starts + slots * side.scale_token)
        scale_bytes = _load_columns(rows, live, width // block, blocks)
    return packed, scale_bytes


@triton.jit
def load_fp4(
    pages,
    page_stride,
    page,
    slots,
    head,
    live,
    side: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    pin: tl.constexpr,
):
    """Even and odd values `[tokens, side.padded]` of a four-bit format, as `operand`s.

    Args, beside those of `load_fp4_bytes`:
        operand: dtype of the result; float16 for nvfp4 alone, which it holds exactly.
        ptx: whether to use inline PTX.
        pin: whether to keep decoded values in their layout (see `pinned`).
    """
    packed, scale_bytes = load_fp4_bytes(pages, page_stride, page, slots, head, live, side)
    block: tl.constexpr = side.block
    if side.kind == "nvfp4":
        factors = e4m3_to_float16(scale_bytes) * 32768.0  # from 2^-8 to 2^7
        even, odd = nvfp4_to_float16(packed, spread(factors, block), ptx)
    elif ptx and operand == tl.bfloat16:
        # A bfloat16 has the exponent of E8M0; byte 0 is a subnormal, byte 0xFF would be infinity.
        bits = scale_bytes.to(tl.uint16) << 7
        bits = tl.where(scale_bytes == 0, 0x0040, tl.where(scale_bytes == 0xFF, 0x7FC0, bits))
        factors = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        even, odd = e8m0_fp4_to_bfloat16(packed, spread(factors, block))
    else:
        factors = spread(e8m0_to_float32(scale_bytes) * 0.015625, block)
        even = e2m1_to_float32(packed) * factors
        odd = e2m1_to_float32(packed >> 4) * factors
    return pinned(even.to(operand), pin), pinned(odd.to(operand), pin)


@triton.jit
def load_plain_rows(
    pages, page_stride, page, slots, head, live, side: tl.constexpr, contiguous: tl.constexpr = 0
):
    """Elements `[tokens, side.padded]` of a format without block scales, as they are stored.

    Args: as for `load_fp4_bytes`.
    """
    rows = pages + side.data + head * side.data_head
    rows += page * page_stride + slots * side.data_token
    if side.kind == "float32":
        rows = rows.to(tl.pointer_type(tl.float32), bitcast=True)
    elif side.kind == "float16":
        rows = rows.to(tl.pointer_type(tl.float16), bitcast=True)
    elif side.kind == "bfloat16":
        rows = rows.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    return _load_columns(rows, live, side.head_size, side.padded, contiguous)


@triton.jit
def load_plain(
    pages,
    page_stride,
    page,
    slots,
    head,
    live,
    side: tl.constexpr,
    operand: tl.constexpr,
    ptx: tl.constexpr,
    pin: tl.constexpr,
    casts: tl.constexpr,
):
    """Values `[tokens, side.padded]` of a format without block scales, as `operand`s.

    Args, beside those of `load_fp4`:
        casts: whether the GPU converts E4M3 itself (SM89 and later); then without 2^-8.
    """
    values = load_plain_rows(pages, page_stride, page, slots, head, live, side)
    if side.kind == "fp8_e4m3" and casts:
        return pinned(values.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(operand), pin)
    if side.kind == "fp8_e4m3" or side.kind == "fp8_e5m2":
        kind: tl.constexpr = side.kind  # a plain string cannot be an argument
        return pinned(fp8_to_float16(values, kind, ptx).to(operand), pin)
    return values.to(operand)
