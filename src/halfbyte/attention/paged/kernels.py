"""Attention on packed pages in Triton: every format, decode and prefill.

A program has a tile of queries of one sequence and KV head: some query tokens times the query heads
of the group, which share the keys. It iterates over tiles of keys through the block table with an
online softmax in base 2. Long sequences are split among programs whose partial results a second
kernel merges. The number of splits depends on shapes only, so that there is no sync and a captured
graph follows changing lengths.

Batch invariance: rows of a tile are independent, and key tiles and (with `batch_invariant`) splits
start at multiples of fixed sizes. A tile without visible keys for a row leaves its bits unchanged.

Powers of two that operands omit (`kv_tiles.operand_shift`), global scales and log2(e) are folded
into one multiplication of the scores and one of the output. Weights that multiply float16 values
are times 2^15, so that they keep float16's full precision down to 2^-29.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.attention.paged.tiles import add_values, dot_keys, load_query
from halfbyte.attention.paged.work import find_sequence, first_tile, key_range

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def soft_cap(scores, cap):
    """`cap * tanh(x)` of scores with `exp2(scores) = e^2x`."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores))


@triton.jit
def is_visible(keys, positions, window, windowed: tl.constexpr):
    """`[rows, keys]`: whether a row at a position attends to a key."""
    seen = keys[None, :] <= positions[:, None]
    if windowed:
        seen &= keys[None, :] > positions[:, None] - window
    return seen


@triton.jit
def load_sinks(sinks, heads, row_live, has_sinks: tl.constexpr):
    """Sinks of rows, in base 2; -inf without sinks."""
    sink = tl.full(heads.shape, float("-inf"), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + heads, mask=row_live, other=0.0).to(tl.float32) * LOG2E
    return sink


@triton.jit
def finalize_softmax(reference, total, sink):
    """Final scale of rows, and the natural log of their denominators (LSE).

    Args:
        reference: subtracted from a row's scores in base 2, so that its weights are
            `2^(score - reference)`; -inf for rows without keys.
        total: sum of the weights.
        sink: a logit times log2(e) that is added to the denominator; -inf for none.
    """
    top = tl.maximum(reference, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    rescale = tl.exp2(reference - top)
    denominator = total * rescale + tl.exp2(sink - top)
    empty = denominator == 0.0
    factor = rescale / tl.where(empty, 1.0, denominator)
    log = (top + tl.log2(tl.where(empty, 1.0, denominator))) * _LN2
    return factor, tl.where(empty, float("-inf"), log)


# Numbers that change per batch must not trigger recompilation: it takes a second, and variants
# could round differently.
@triton.jit(
    do_not_specialize=[
        *("num_seqs", "first_token", "last_token", "num_splits", "window", "table_stride"),
        "bias_stride",
    ]
)
def attention_kernel(
    query,
    pages,
    tables,
    starts,
    lengths,
    k_global,
    v_global,
    sinks,
    out,
    lse,
    partial_out,
    partial_stats,
    bias,
    first_scores,
    first_indices,
    first_values,
    score_scale,
    cap,
    out_scale,
    window,
    num_seqs,
    first_token,
    last_token,
    num_splits,
    table_stride,
    bias_stride,
    query_token,
    query_head,
    out_token,
    out_head,
    out_column,
    page_stride,
    k: tl.constexpr,
    v: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    k_operand: tl.constexpr,
    v_operand: tl.constexpr,
    scale_query: tl.constexpr,
    k_global_on_device: tl.constexpr,
    v_global_on_device: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    segment: tl.constexpr,
    knows_first: tl.constexpr,
    split: tl.constexpr,
    split_length: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    ptx: tl.constexpr,
    pin: tl.constexpr,
    casts: tl.constexpr,
):
    """Attention of a tile of queries to all its keys, or to one split of them.

    Grid: (tiles of query tokens, KV heads times blocks of their query heads, splits). `first_tile`
    assigns tiles to sequences; programs without query tokens return at once.

    Args, beside those of `launcher.run`:
        tables, starts, lengths: `block_tables`, `query_start_loc` and `seq_lens`.
        k_global, v_global: float32 scalars, read where `k_global_on_device`, `v_global_on_device`.
        partial_out: float32 `[splits, tokens, heads, head_size_v]`, written where `split`.
        partial_stats: float32 `[splits, tokens, heads, 2]`: a row's `reference` and `total`, see
            `finalize_softmax`.
        bias, first_scores, first_indices, first_values: of `TransformedQuery`, for the tokens of
            this launch; the first is read where `segment`, the others where `knows_first`.
        bias_stride: segments of a row of `bias`.
        score_scale: takes dot products to logits times log2(e), or where `capped` to the exponent
            of `exp2` that tanh needs.
        cap: `softcap * log2(e)`.
        out_scale: scale of the output.
        first_token, last_token: query tokens of this launch.
        split_length: tokens per split, counted from position 0; 0 divides a tile's keys evenly.
        segment: tokens that share a mean of K; 0 where K is not centred.
    """
    heads_per_tile: tl.constexpr = group if group < block_m else block_m
    tokens_per_tile: tl.constexpr = block_m // heads_per_tile
    head_blocks: tl.constexpr = (group + heads_per_tile - 1) // heads_per_tile
    weight_shift: tl.constexpr = 15 if v_operand == tl.float16 else 0

    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // head_blocks
    head_block = tl.program_id(1) % head_blocks
    chunk = tl.program_id(2)

    sequence = find_sequence(starts, tile, num_seqs, first_token, last_token, tokens_per_tile)
    tile -= first_tile(starts, sequence, first_token, last_token, tokens_per_tile)
    query_end = tl.load(starts + sequence + 1)
    begin_token = tl.maximum(tl.load(starts + sequence), first_token) + tile * tokens_per_tile
    end_token = tl.minimum(query_end, last_token)
    if begin_token >= end_token:
        return
    end_token = tl.minimum(end_token, begin_token + tokens_per_tile)

    # Token t of the batch is at position t + shift of its sequence.
    shift = tl.load(lengths + sequence) - query_end
    rows = tl.arange(0, block_m)
    tokens = begin_token + rows // heads_per_tile
    group_heads = head_block * heads_per_tile + rows % heads_per_tile
    row_live = (tokens < end_token) & (group_heads < group)
    heads = kv_head * group + group_heads
    positions = tokens + shift

    key_end = end_token + shift
    key_begin = 0
    if windowed:
        key_begin = tl.maximum(begin_token + shift - window + 1, 0)
    begin, end = key_range(key_begin, key_end, chunk, num_splits, split, split_length, block_n)

    if split:
        partial_rows = (chunk * (last_token - first_token)).to(tl.int64) + tokens - first_token
        partial_rows = partial_rows * (kv_heads * group) + heads
        if begin >= end:
            tl.store(partial_stats + 2 * partial_rows, float("-inf"), mask=row_live)
            tl.store(partial_stats + 2 * partial_rows + 1, 0.0, mask=row_live)
            return

    tokens64, heads64 = tokens.to(tl.int64), heads.to(tl.int64)  # strides may be long
    launch_rows = (tokens64 - first_token) * (kv_heads * group) + heads
    query += (tokens64 - first_token)[:, None] * query_token + heads64[:, None] * query_head
    q_even, q_odd, inverse = load_query(query, row_live, k, k_operand, scale_query)

    if k_global_on_device:
        score_scale *= tl.load(k_global)
    if v_global_on_device:
        out_scale *= tl.load(v_global)
    row_scale = inverse * score_scale

    tables += sequence.to(tl.int64) * table_stride

    top = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.full((block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, v.padded), 0.0, tl.float32)
    acc_odd = acc
    first_key = tl.full((block_m,), 0, tl.int32)  # 1 if token 0 is a constant, not in the pages
    if knows_first:
        index = tl.load(first_indices + launch_rows, mask=row_live, other=-1)
        first_key = tl.where(index >= 0, 1, 0)
        # The split that has position 0 starts its sums with the constant's score and V.
        begins_here = row_live & (index >= 0) & (begin == 0)
        top = tl.load(first_scores + launch_rows, mask=begins_here, other=float("-inf"))
        total = tl.where(begins_here, 2.0**weight_shift, 0.0)
        first_values += (tl.maximum(index, 0) * kv_heads + kv_head)[:, None] * v.head_size
        acc, acc_odd = load_query(first_values, begins_here, v, tl.float32, False)[:2]
        acc *= 2.0**weight_shift / out_scale
        acc_odd *= 2.0**weight_shift / out_scale
    for start in tl.range(begin, end, block_n):
        keys = start + tl.arange(0, block_n)
        live = (keys >= key_begin) & (keys < end)
        if k.block_size % block_n == 0:
            page = tl.load(tables + start // k.block_size).to(tl.int64)
        else:
            page = tl.load(tables + keys // k.block_size, mask=live, other=0).to(tl.int64)
        slots = keys % k.block_size

        scores = dot_keys(
            even=q_even,
            odd=q_odd,
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            kv_head=kv_head,
            live=live,
            k=k,
            operand=k_operand,
            ptx=ptx,
            pin=pin,
            casts=casts,
        )
        scores *= row_scale[:, None]
        if segment > 0:
            if segment % block_n == 0:
                column = bias + launch_rows * bias_stride + start // segment
                scores += tl.load(column, mask=row_live, other=0.0)[:, None]
            else:
                columns = (launch_rows * bias_stride)[:, None] + (keys // segment)[None, :]
                is_known = row_live[:, None] & live[None, :]
                scores += tl.load(bias + columns, mask=is_known, other=0.0)
        if capped:
            scores = soft_cap(scores, cap)
        visible = live[None, :] & is_visible(keys, positions, window, windowed)
        if knows_first:
            visible &= keys[None, :] >= first_key[:, None]
        scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - unit)
        weights = tl.exp2(scores - (unit - weight_shift)[:, None])
        total = total * rescale + tl.sum(weights, 1)
        weights = weights.to(v_operand)
        acc, acc_odd = add_values(
            acc=acc,
            acc_odd=acc_odd,
            rescale=rescale,
            weights=weights,
            pages=pages,
            page_stride=page_stride,
            page=page,
            slots=slots,
            kv_head=kv_head,
            live=live,
            v=v,
            operand=v_operand,
            ptx=ptx,
            pin=pin,
            casts=casts,
        )
        top = new_top

    if v.fp4:
        columns = tl.arange(0, 2 * v.padded)[None, :]
        result = tl.reshape(tl.join(acc, acc_odd), (block_m, 2 * v.padded))
    else:
        columns = tl.arange(0, v.padded)[None, :]
        result = acc
    mask = row_live[:, None] & (columns < v.head_size)
    reference = top - weight_shift
    if split:
        tl.store(partial_stats + 2 * partial_rows, reference, mask=row_live)
        tl.store(partial_stats + 2 * partial_rows + 1, total, mask=row_live)
        tl.store(partial_out + partial_rows[:, None] * v.head_size + columns, result, mask=mask)
    else:
        sink = load_sinks(sinks, heads, row_live, has_sinks)
        factor, log = finalize_softmax(reference, total, sink)
        result *= (factor * out_scale)[:, None]
        out += tokens64[:, None] * out_token + heads64[:, None] * out_head
        tl.store(out + columns * out_column, result, mask=mask)
        if has_lse:
            tl.store(lse + tokens64 * (kv_heads * group) + heads, log, mask=row_live)


@triton.jit(do_not_specialize=["num_splits", "first_token", "num_tokens"])
def merge_kernel(
    partial_out,
    partial_stats,
    v_global,
    sinks,
    out,
    lse,
    out_scale,
    num_splits,
    first_token,
    num_tokens,
    out_token,
    out_head,
    out_column,
    num_heads: tl.constexpr,
    head_size_v: tl.constexpr,
    padded_v: tl.constexpr,
    v_global_on_device: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    block: tl.constexpr,
):
    """One row of the output from the partial results of all its splits."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, padded_v)
    one = tl.arange(0, 1)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.full((1,), 0.0, tl.float32)
    acc = tl.full((padded_v,), 0.0, tl.float32)
    for first in tl.range(0, num_splits, block):
        splits = first + tl.arange(0, block)
        live = splits < num_splits
        rows = (splits.to(tl.int64) * num_tokens + token) * num_heads + head
        reference = tl.load(partial_stats + 2 * rows, mask=live, other=float("-inf"))
        part = tl.load(partial_stats + 2 * rows + 1, mask=live, other=0.0)
        live = live & (reference != float("-inf"))  # empty splits wrote no output
        values = tl.load(
            partial_out + rows[:, None] * head_size_v + columns[None, :],
            mask=live[:, None] & (columns < head_size_v)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(reference, 0))
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - unit)
        weights = tl.exp2(reference - unit)
        total = total * rescale + tl.sum(part * weights, 0)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        top = new_top
    if v_global_on_device:
        out_scale *= tl.load(v_global)
    sink = tl.full((1,), float("-inf"), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head + one).to(tl.float32) * LOG2E
    factor, log = finalize_softmax(top, total, sink)
    token += first_token
    out += token * out_token + head * out_head
    tl.store(out + columns * out_column, acc * (factor * out_scale), mask=columns < head_size_v)
    if has_lse:
        tl.store(lse + token * num_heads + head + one, log)
