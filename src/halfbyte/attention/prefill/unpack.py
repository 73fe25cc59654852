"""Unpack tokens of the cache into contiguous workspaces, in Triton, for every format.

For attention of many queries, which pays for unpacking once and multiplies dense matrices after.
The values are those of `halfbyte.kvcache.read_tokens`, rounded once; K that a recipe changed comes
as K' plus the mean of its segment, rotated as K' is, for queries that are rotated, too. A program
takes K or V of one head and a run of tokens of one sequence. A thread takes eight values at a time,
of which it stores 16 bytes: no exchange between threads.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
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
from halfbyte.kernels.formats.kv_tiles import (
    load_fp4_bytes,
    load_plain_rows,
    multiplier,
    page_stride_of,
    side_geometry,
)
from halfbyte.kernels.runtime.devices import current_device
from halfbyte.kvcache.transform import MARK, KVTransform
from halfbyte.layouts import PageLayout

# What decoding leaves out: E2M1 times E4M3 comes times 2^-7, E4M3 times 2^-8.
_FACTORS = {"nvfp4": 2.0**7, "fp8_e4m3": 2.0**8}
_TOKENS = 64
"""Tokens per program: 4 KiB of packed values of a head of 128."""


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
    head,
    live,
    factor,
    means,
    constant,
    is_constant,
    side: tl.constexpr,
    centred: tl.constexpr,
    knows_first: tl.constexpr,
    ptx: tl.constexpr,
):
    """K or V of one head in `slots` of `page`, times `factor`, to `rows` of `out`.

    Args:
        means: pointers `[tokens]` to what is added to each token's values, where `centred`.
        constant: pointer to what stands in place of tokens that are `is_constant`, where
            `knows_first`.
    """
    if side.fp4:
        packed, scales = load_fp4_bytes(pages, page_stride, page, slots, head, live, side, 4)
        if side.kind == "nvfp4":
            factors = spread(e4m3_to_float16(scales) * 32768.0, 8)
            even, odd = nvfp4_to_float16(packed, factors, ptx)
            even, odd = even.to(tl.float32), odd.to(tl.float32)
        else:
            factors = spread(e8m0_to_float32(scales), 16 if side.kind == "mxfp4" else 8)
            even = e2m1_to_float32(packed) * factors
            odd = e2m1_to_float32(packed >> 4) * factors
        even *= factor
        odd *= factor
        if centred:
            pairs = 2 * tl.arange(0, side.padded)[None, :]
            mask = live[:, None] & (pairs < side.head_size)
            even += tl.load(means[:, None] + pairs, mask=mask, other=0.0)
            odd += tl.load(means[:, None] + pairs + 1, mask=mask, other=0.0)
        even = even.to(out.dtype.element_ty)
        odd = odd.to(out.dtype.element_ty)
        values = tl.reshape(tl.join(even, odd), (slots.shape[0], 2 * side.padded))
    else:
        values = load_plain_rows(pages, page_stride, page, slots, head, live, side, 8)
        if side.kind == "fp8_e4m3" or side.kind == "fp8_e5m2":
            kind: tl.constexpr = side.kind  # a plain string cannot be an argument
            values = fp8_to_float16(values, kind, ptx).to(tl.float32) * factor
        values = values.to(tl.float32).to(out.dtype.element_ty)
    columns = tl.arange(0, values.shape[1])[None, :]
    mask = live[:, None] & (columns < side.head_size)
    if knows_first:  # noqa: SIM102 - which the compiler knows
        if tl.max(is_constant.to(tl.int32), 0) > 0:
            known = tl.load(constant + columns, mask=columns < side.head_size, other=0.0)
            values = tl.where(is_constant[:, None], known.to(out.dtype.element_ty), values)
    out += rows[:, None] * out_token + head * out_head + columns
    tl.store(out, values, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "num_segments"])
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
    means,
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
    segment: tl.constexpr,
    knows_first: tl.constexpr,
    mark: tl.constexpr,
    num_tokens: tl.constexpr,
    ptx: tl.constexpr,
):
    """Tokens `begins[s] + program_id(0) * num_tokens` on of sequence s = `program_id(1)`.

    Args, beside those of `unpack_tokens`:
        means: float32 `[num_segments, kv_heads, head_size]`, rotated as K'; read where `segment`,
            the tokens that share one.
        first_keys, first_values: `[constants, kv_heads, size]`, read where `knows_first`; K rotated
            as K'.
    """
    sequence = tl.program_id(1)
    begin = tl.load(begins + sequence)
    first = begin + tl.program_id(0) * num_tokens
    end = tl.load(ends + sequence)
    if first >= end:
        return
    tokens = first + tl.arange(0, num_tokens)
    live = tokens < end
    tables += sequence.to(tl.int64) * table_stride
    page = tl.load(tables + tokens // k.block_size, mask=live, other=0).to(tl.int64)
    slots = tokens % k.block_size
    rows = (tl.load(first_rows + sequence) + tokens - begin).to(tl.int64)
    head = tl.program_id(2) % kv_heads
    is_constant = live & (tokens < 0)
    constant = 0
    if knows_first:
        start = pages + tl.load(tables).to(tl.int64) * page_stride
        # A page before the window may be another sequence's: position 0 is asked for or not there.
        has_start = first == 0
        scale_byte = tl.load(start + k.scale + head * k.scale_head, mask=has_start, other=0)
        index = tl.load(start + k.data + head * k.data_head, mask=has_start, other=0)
        is_marked = has_start & (scale_byte == mark)
        is_constant = live & is_marked & (tokens == 0)
        constant = tl.where(is_marked, index.to(tl.int32), 0) * kv_heads + head
    if tl.program_id(2) < kv_heads:
        if k_global_on_device:
            k_factor *= tl.load(k_global)
        of_token = means
        if segment > 0:
            turn = tl.minimum(tokens // segment, num_segments - 1)
            of_token = means + (turn * kv_heads + head) * k.head_size
        _unpack_side(
            k_out,
            k_out_token,
            k_out_head,
            pages,
            page_stride,
            page,
            slots,
            rows,
            head,
            live,
            k_factor,
            of_token,
            first_keys + constant * k.head_size,
            is_constant,
            k,
            segment > 0,
            knows_first,
            ptx,
        )
    else:
        if v_global_on_device:
            v_factor *= tl.load(v_global)
        _unpack_side(
            v_out,
            v_out_token,
            v_out_head,
            pages,
            page_stride,
            page,
            slots,
            rows,
            head,
            live,
            v_factor,
            means,
            first_values + constant * v.head_size,
            is_constant,
            v,
            False,
            knows_first,
            ptx,
        )


def unpack_tokens(
    pages: torch.Tensor,
    layout: PageLayout,
    block_tables: torch.Tensor,
    begins: Sequence[int] | torch.Tensor,
    ends: Sequence[int] | torch.Tensor,
    rows: Sequence[int] | torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    max_tokens: int | None = None,
    transform: KVTransform | None = None,
) -> None:
    """Dequantize tokens `begins[s] .. ends[s] - 1` of every sequence s to `rows[s]` and following.

    Never waits for the GPU where `begins`, `ends` and `rows` lie there.

    Args:
        pages: uint8 `[num_pages, page_stride]`.
        layout: of `pages`.
        block_tables: int32 `[sequences, max_pages]`.
        begins, ends: positions in each sequence; numbers, or int32 `[sequences]` on the device.
        rows: row of the workspaces that token `begins[s]` goes to, likewise.
        k_scale, v_scale: decode multipliers, floats or float32 tensors of one element; formats
            without a global scale ignore them.
        k_out: bfloat16, float16 or float32 `[rows, kv_heads, head_size]`; any strides, but
            contiguous in the last dimension. A transposed `[kv_heads, rows, head_size]` gives HND.
        v_out: likewise, `[rows, kv_heads, head_size_v]`.
        max_tokens: bound on `ends[s] - begins[s]`; by default the largest of numbers, or the rows
            of `k_out`. Tokens past it may be left out.
        transform: what K in NVFP4 went through; `k_out` is then rotated, as queries must be.

    Raises:
        ValueError: shapes, strides or alignments that do not fit.
    """
    for name, out, head_size in (
        ("k_out", k_out, layout.head_size),
        ("v_out", v_out, layout.head_size_v),
    ):
        if tuple(out.shape[1:]) != (layout.num_kv_heads, head_size) or out.stride(2) != 1:
            raise ValueError(
                f"{name}: expected [rows, {layout.num_kv_heads}, {head_size}], contiguous in the "
                f"last dimension, got {tuple(out.shape)} with strides {out.stride()}"
            )
    if max_tokens is None:
        max_tokens = k_out.shape[0]
        if not isinstance(begins, torch.Tensor) and not isinstance(ends, torch.Tensor):
            counts = (end - begin for begin, end in zip(begins, ends, strict=True))
            max_tokens = max(counts, default=0)
    num_seqs = block_tables.shape[0]
    if num_seqs == 0 or max_tokens <= 0:
        return
    page_stride = page_stride_of(pages, layout)
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    k, v = side_geometry(layout, "k"), side_geometry(layout, "v")
    k_factor, k_global = multiplier(k_scale, layout.k_dtype, pages.device)
    v_factor, v_global = multiplier(v_scale, layout.v_dtype, pages.device)
    grid = (-(-max_tokens // _TOKENS), num_seqs, 2 * layout.num_kv_heads)
    means = first_keys = first_values = None
    if transform is not None:
        means = transform.packed_means(block_tables.shape[1] * layout.block_size)
        first_keys, first_values = transform.packed_first_keys, transform.first_values
    with current_device(pages.get_device()):
        unpack_kernel[grid](
            pages,
            block_tables,
            *(_int32(x, pages.device) for x in (begins, ends, rows)),
            pages if k_global is None else k_global,
            pages if v_global is None else v_global,
            k_out,
            v_out,
            pages if means is None else means,
            pages if first_keys is None else first_keys,
            pages if first_values is None else first_values.contiguous(),
            k_factor * _FACTORS.get(k.kind, 1.0),
            v_factor * _FACTORS.get(v.kind, 1.0),
            page_stride,
            block_tables.stride(0),
            0 if means is None else len(means),
            *k_out.stride()[:2],
            *v_out.stride()[:2],
            k=k,
            v=v,
            kv_heads=layout.num_kv_heads,
            k_global_on_device=k_global is not None,
            v_global_on_device=v_global is not None,
            segment=0 if transform is None or means is None else transform.segment,
            knows_first=first_keys is not None,
            mark=MARK,
            num_tokens=_TOKENS,
            ptx=pages.is_cuda,
        )


def _int32(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(numbers, torch.Tensor):
        return numbers.to(device, torch.int32)
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
