"""Prefill attention on unpacked rows of K and V, in Triton.

For cases that PyTorch's dense attention does not support or is slower at: sliding windows,
soft-caps, sinks and LSE in one pass, K and V of different head sizes, many short sequences. A
program has a tile of queries of one sequence and KV head: some tokens times the query heads of the
group, which share the keys. It first processes the keys that all rows see, without a mask, then the
keys at both ends of the range, which need one.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.kernels import finalize_softmax, is_visible, load_sinks, soft_cap
from halfbyte.attention.paged.plan import Tiles, exponent_factors
from halfbyte.kernels.runtime.devices import current_device

_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load_rows(rows, keys, end, dims, width: tl.constexpr, masked: tl.constexpr):
    """`[keys, dims]` elements; zeros past `width`, and where `masked` from `end` on."""
    if masked:
        return tl.load(rows, mask=(keys < end)[:, None] & (dims < width)[None, :], other=0.0)
    if dims.shape[0] == width:
        return tl.load(rows)
    return tl.load(rows, mask=(dims < width)[None, :], other=0.0)


@triton.jit
def _add_keys(
    sums,
    query,
    sides,
    start,
    seen,
    factors,
    masked: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    folded: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    block_n: tl.constexpr,
):
    """One step of the online softmax, in base 2, over `block_n` keys from `start` on."""
    acc, total, top = sums
    key, key_row, k_dims, value, value_row, v_dims = sides
    end, positions, window = seen
    score_scale, cap = factors
    keys = start + tl.arange(0, block_n)
    rows = key + keys[:, None] * key_row + k_dims[None, :]
    tile = _load_rows(rows, keys, end, k_dims, head_size, masked).to(query.dtype)
    scores = tl.dot(query, tl.trans(tile))
    if not folded:
        scores *= score_scale
    if capped:
        scores = soft_cap(scores, cap)
    if masked:
        visible = is_visible(keys, positions, window, windowed)
        scores = tl.where(visible, scores, float("-inf"))
    # A positive scale is fused into the subtraction of the max (one FMA).
    scale = score_scale if folded else 1.0
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    unit = new_top
    if masked:
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - unit)
    weights = tl.exp2(scores * scale - unit[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc *= rescale[:, None]
    rows = value + keys[:, None] * value_row + v_dims[None, :]
    tile = _load_rows(rows, keys, end, v_dims, head_size_v, masked).to(query.dtype)
    acc = tl.dot(weights.to(query.dtype), tile, acc)
    return acc, total, new_top


# As in `paged/kernels.py`: numbers that change per batch must not trigger recompilation.
@triton.jit(do_not_specialize=["window"])
def rows_kernel(
    query,
    key,
    value,
    tiles,
    sinks,
    out,
    lse,
    score_scale,
    cap,
    window,
    query_token,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    out_token,
    out_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    operand: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    folded: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Attention of a tile of queries to all keys in its range.

    Grid: tiles times KV heads times blocks of their query heads, tiles slowest.

    Args, beside those of `run_rows`:
        score_scale: takes dot products to logits times log2(e), or where `capped` to the exponent
            of `exp2` that tanh needs.
        cap: `softcap * log2(e)`.
        operand: dtype that enters matmuls.
        folded: whether `score_scale` is applied in the softmax: it is positive, without soft-cap.
    """
    heads_per_tile: tl.constexpr = group if group < block_m else block_m
    head_blocks: tl.constexpr = (group + heads_per_tile - 1) // heads_per_tile
    tiles += tl.program_id(0) // (kv_heads * head_blocks) * 8
    kv_head = tl.program_id(0) % (kv_heads * head_blocks) // head_blocks
    head_block = tl.program_id(0) % head_blocks
    first_token = tl.load(tiles)
    count = tl.load(tiles + 1)
    first_row = tl.load(tiles + 2).to(tl.int64)
    position = tl.load(tiles + 3)

    rows = tl.arange(0, block_m)
    tokens = (first_token + rows // heads_per_tile).to(tl.int64)
    group_heads = head_block * heads_per_tile + rows % heads_per_tile
    row_live = (rows // heads_per_tile < count) & (group_heads < group)
    heads = (kv_head * group + group_heads).to(tl.int64)
    positions = position + rows // heads_per_tile
    k_dims = tl.arange(0, padded)
    v_dims = tl.arange(0, padded_v)

    at = tokens[:, None] * query_token + heads[:, None] * query_head + k_dims[None, :]
    mask = row_live[:, None] & (k_dims < head_size)[None, :]
    queries = tl.load(query + at, mask=mask, other=0.0).to(operand)
    key += first_row * key_row + kv_head * key_head
    value += first_row * value_row + kv_head * value_head

    # Keys begin .. end are seen by at least one row. All rows see those from seen_by_all up to the
    # first row's own position.
    begin = 0
    edge = 0
    end = position + count
    if windowed:
        begin = tl.maximum(position - window + 1, 0)
        seen_by_all = tl.maximum(end - window, 0)
        edge = (seen_by_all - begin + block_n - 1) // block_n
    middle = begin + edge * block_n
    middle_end = middle + tl.maximum(position + 1 - middle, 0) // block_n * block_n
    rest = tl.maximum(end - middle_end + block_n - 1, 0) // block_n

    top = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.full((block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, padded_v), 0.0, tl.float32)
    sides = (key, key_row, k_dims, value, value_row, v_dims)
    seen = (end, positions, window)
    factors = (score_scale, cap)
    for start in tl.range(middle, middle_end, block_n):
        acc, total, top = _add_keys(
            sums=(acc, total, top),
            query=queries,
            sides=sides,
            start=start,
            seen=seen,
            factors=factors,
            masked=False,
            windowed=windowed,
            capped=capped,
            folded=folded,
            head_size=head_size,
            head_size_v=head_size_v,
            block_n=block_n,
        )
    for i in tl.range(0, edge + rest):
        start = begin + i * block_n
        if i >= edge:
            start += middle_end - middle
        acc, total, top = _add_keys(
            sums=(acc, total, top),
            query=queries,
            sides=sides,
            start=start,
            seen=seen,
            factors=factors,
            masked=True,
            windowed=windowed,
            capped=capped,
            folded=folded,
            head_size=head_size,
            head_size_v=head_size_v,
            block_n=block_n,
        )

    sink = load_sinks(sinks, heads, row_live, has_sinks)
    factor, log = finalize_softmax(top, total, sink)
    at = tokens[:, None] * out_token + heads[:, None] * out_head + v_dims[None, :]
    mask = row_live[:, None] & (v_dims < head_size_v)[None, :]
    tl.store(out + at, acc * factor[:, None], mask=mask)
    if has_lse:
        tl.store(lse + tokens * (kv_heads * group) + heads, log, mask=row_live)


def run_rows(
    inputs: AttentionInputs,
    key: torch.Tensor,
    value: torch.Tensor,
    work: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Write the rows of the output, and of the LSE, of the query tokens in `work`.

    Does not sync the GPU.

    Args:
        inputs: of `paged_attention`, checked, in bfloat16 or float16; the pages are not read.
        key: of the query's dtype, `[rows, kv_heads, head_size]`, contiguous in the last dimension.
        value: likewise, `[rows, kv_heads, head_size_v]`.
        work: as of `chunks.Chunks`; tiles have at most `tiles.tokens(group)` query tokens, and see
            rows from the first key to the last token's own.
        tiles: with which `work` was made (`paged.plan.choose_row_tiles`).
    """
    query, out, lse, sinks = inputs.query, inputs.out, inputs.lse, inputs.sinks
    scale, sliding_window, softcap = inputs.scale, inputs.sliding_window, inputs.softcap
    _, num_heads, head_size = query.shape
    kv_heads, head_size_v = value.shape[1:]
    group = num_heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    head_blocks = -(-group // tiles.block_m)
    grid = (work.shape[0] * kv_heads * head_blocks,)
    score_scale, cap = exponent_factors(scale, softcap)
    with current_device(query.get_device()):
        rows_kernel[grid](
            query=query,
            key=key,
            value=value,
            tiles=work,
            # Absent tensors get any pointer; it is never read.
            sinks=out if sinks is None else sinks.contiguous(),
            out=out,
            lse=out if lse is None else lse,
            score_scale=score_scale,
            cap=cap,
            window=sliding_window or 0,
            query_token=query.stride(0),
            query_head=query.stride(1),
            key_row=key.stride(0),
            key_head=key.stride(1),
            value_row=value.stride(0),
            value_head=value.stride(1),
            out_token=out.stride(0),
            out_head=out.stride(1),
            # Triton's interpreter has no bfloat16 matmul.
            operand=_OPERANDS[query.dtype] if query.is_cuda else tl.float32,
            has_sinks=sinks is not None,
            has_lse=lse is not None,
            **row_constants(kv_heads, group, head_size, head_size_v, tiles),
            windowed=sliding_window is not None,
            capped=bool(softcap),
            folded=not softcap and scale > 0,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def row_constants(
    kv_heads: int, group: int, head_size: int, head_size_v: int, tiles: Tiles
) -> dict[str, int]:
    """Compile-time constants, in addition to the options of a call."""
    return {
        "kv_heads": kv_heads,
        "group": group,
        "head_size": head_size,
        "head_size_v": head_size_v,
        "padded": triton.next_power_of_2(head_size),
        "padded_v": triton.next_power_of_2(head_size_v),
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
    }
