"""Triton kernel: attention to the last tokens as the model made them."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.attention.paged.kernels import soft_cap
from halfbyte.attention.paged.work import find_sequence, first_tile
from halfbyte.kernels.formats.dot_operands import dot_precision


@triton.jit
def _load_rows(
    ring,
    new,
    in_ring,
    in_new,
    is_new,
    live,
    head_size: tl.constexpr,
    padded: tl.constexpr,
):
    """K or V `[keys, padded]`: of the step's tokens at `new + in_new`, of others in the ring."""
    dims = tl.arange(0, padded)[None, :]
    inside = dims < head_size
    of_ring = live & ~is_new
    old = tl.load(ring + in_ring[:, None] + dims, mask=of_ring[:, None] & inside, other=0.0)
    own = tl.load(new + in_new[:, None] + dims, mask=(live & is_new)[:, None] & inside, other=0.0)
    return tl.where(is_new[:, None], own.to(old.dtype), old)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "window", "reach"],
)
def recent_kernel(
    query,
    keys,
    values,
    entries,
    key,
    value,
    starts,
    lengths,
    first_scores,
    first_indices,
    first_values,
    out,
    lse,
    score_scale,
    cap,
    num_seqs,
    num_tokens,
    reach,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    ring: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    operand: tl.constexpr,
    capped: tl.constexpr,
    knows_first: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """A tile of queries of one sequence and KV head against their last `reach` tokens.

    Grid: (tiles of query tokens, KV heads times blocks of their query heads). Keys are taken in
    blocks that begin at multiples of `block_n`, so that a row's sums do not depend on other rows.

    Args, beside those of `RecentInputs`:
        first_scores, first_indices, first_values: of `TransformedQuery`: a first token that is none
            of the page's is attended to as well; read where `knows_first`.
        out: float32 `[tokens, heads, head_size_v]`.
        lse: float32 `[tokens, heads]`, log2 of the denominators; -inf for rows that stand nowhere.
        score_scale, cap: as of `attend_kernel`.
    """
    heads_per_tile: tl.constexpr = group if group < block_m else block_m
    tokens_per_tile: tl.constexpr = block_m // heads_per_tile
    head_blocks: tl.constexpr = (group + heads_per_tile - 1) // heads_per_tile
    kv_head = tl.program_id(1) // head_blocks
    head_block = tl.program_id(1) % head_blocks

    tile = tl.program_id(0)
    sequence = find_sequence(starts, tile, num_seqs, 0, num_tokens, tokens_per_tile)
    tile -= first_tile(starts, sequence, 0, num_tokens, tokens_per_tile)
    start = tl.load(starts + sequence)
    query_end = tl.load(starts + sequence + 1)
    begin_token = start + tile * tokens_per_tile
    if begin_token >= query_end:
        return
    length = tl.load(lengths + sequence)
    first_new = length - (query_end - start)  # position of the sequence's first query
    row = tl.arange(0, block_m)
    token = begin_token + row // heads_per_tile
    group_head = head_block * heads_per_tile + row % heads_per_tile
    inside = (token < query_end) & (group_head < group)
    head = kv_head * group + group_head
    position = first_new + token - start

    wide_token, wide_head = token.to(tl.int64), head.to(tl.int64)
    dims = tl.arange(0, padded)[None, :]
    place = query + wide_token[:, None] * query_token + wide_head[:, None] * query_head + dims
    q = tl.load(place, mask=inside[:, None] & (dims < head_size), other=0.0).to(operand)

    entry = (tl.load(entries + sequence).to(tl.int64) * kv_heads + kv_head) * ring
    end = tl.minimum(first_new + (query_end - start), tl.max(tl.where(inside, position, -1), 0) + 1)
    first = tl.maximum(first_new + begin_token - start - reach + 1, 0)
    top = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.full((block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, padded_v), 0.0, tl.float32)
    launch_row = wide_token * (kv_heads * group) + wide_head
    if knows_first:
        index = tl.load(first_indices + launch_row, mask=inside, other=-1)
        top = tl.load(first_scores + launch_row, mask=inside, other=float("-inf"))
        is_constant = index >= 0
        total = tl.where(is_constant, 1.0, 0.0)
        constant = (tl.maximum(index, 0) * kv_heads + kv_head) * head_size_v
        columns_v = tl.arange(0, padded_v)[None, :]
        known = is_constant[:, None] & (columns_v < head_size_v)
        acc = tl.load(first_values + constant[:, None] + columns_v, mask=known, other=0.0)
        acc = acc.to(tl.float32)
    for begin in tl.range(first // block_n * block_n, end, block_n):
        at = begin + tl.arange(0, block_n)
        live = (at >= first) & (at < end)
        is_new = at >= first_new
        slot = entry + at % ring
        own = (start + at - first_new).to(tl.int64)
        k = _load_rows(
            keys,
            key + kv_head * key_head,
            slot * head_size,
            own * key_token,
            is_new,
            live,
            head_size,
            padded,
        ).to(operand)
        scores = tl.dot(q, tl.trans(k), input_precision=dot_precision(operand)) * score_scale
        if capped:
            scores = soft_cap(scores, cap)
        distance = position[:, None] - at[None, :]
        visible = live[None, :] & (distance >= 0) & (distance < reach)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - unit)
        weights = tl.exp2(scores - unit[:, None])
        total = total * rescale + tl.sum(weights, 1)
        v = _load_rows(
            values,
            value + kv_head * value_head,
            slot * head_size_v,
            own * value_token,
            is_new,
            live,
            head_size_v,
            padded_v,
        ).to(operand)
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(operand), v, acc, input_precision=dot_precision(operand))
        top = new_top
    some = total > 0.0
    result = acc / tl.where(some, total, 1.0)[:, None]
    columns = tl.arange(0, padded_v)[None, :]
    target = out + launch_row[:, None] * head_size_v + columns
    tl.store(target, result, mask=inside[:, None] & (columns < head_size_v))
    log = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + launch_row, log, mask=inside)
