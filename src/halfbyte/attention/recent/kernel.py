"""Triton kernel: attention to recent tokens, which are kept unpacked."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from halfbyte.attention.paged.kernels import LOG2E, finalize_softmax, load_sinks, soft_cap
from halfbyte.attention.paged.work import find_sequence, first_tile
from halfbyte.kernels.formats.dot_operands import dot_precision


@triton.jit
def _load(x, offsets, live, head_size: tl.constexpr, padded: tl.constexpr):
    """K or V `[keys, padded]` at `x + offsets`; zeros of keys that are not `live`."""
    dims = tl.arange(0, padded)[None, :]
    return tl.load(x + offsets[:, None] + dims, mask=live[:, None] & (dims < head_size), other=0.0)


@triton.jit
def _load_either(
    ring,
    new,
    in_ring,
    in_new,
    is_new,
    live,
    head_size: tl.constexpr,
    padded: tl.constexpr,
):
    """K or V `[keys, padded]`: from `new + in_new` for the step's tokens, else from the ring."""
    old = _load(ring, in_ring, live & ~is_new, head_size, padded)
    own = _load(new, in_new, live & is_new, head_size, padded)
    return tl.where(is_new[:, None], own.to(old.dtype), old)


@triton.jit
def _add_keys(
    sums,
    q,
    k,
    v,
    distance,
    reach,
    factors,
    capped: tl.constexpr,
    operand: tl.constexpr,
):
    """One step of the online softmax, in base 2; `distance` is a row's position less a key's."""
    acc, total, top = sums
    score_scale, cap = factors
    k, v = k.to(operand), v.to(operand)
    scores = tl.dot(q, tl.trans(k), input_precision=dot_precision(operand)) * score_scale
    if capped:
        scores = soft_cap(scores, cap)
    visible = (distance >= 0) & (distance < reach)
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    unit = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - unit)
    weights = tl.exp2(scores - unit[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc *= rescale[:, None]
    acc = tl.dot(weights.to(operand), v, acc, input_precision=dot_precision(operand))
    return acc, total, new_top


# What changes per batch must not trigger recompilation: numbers, and the alignment of logs.
_OF_PACKED = ["packed_tokens", "packed_lse", "log_sequence", "log_token", "log_head"]


@triton.jit
def _load_packed(
    packed,
    packed_lse,
    in_packed,
    in_logs,
    live,
    head_size: tl.constexpr,
    padded: tl.constexpr,
):
    """The result of attention to the pages, float32 `[rows, padded]`, and logs of its denominators
    in base 2 `[rows]`; 0 and -inf for rows that are not `live`, and for those without keys."""
    log = tl.load(packed_lse + in_logs, mask=live, other=float("-inf")) * LOG2E
    x = _load(packed, in_packed, live, head_size, padded)
    # Rows without keys may hold anything.
    return tl.where((log > float("-inf"))[:, None], x.to(tl.float32), 0.0), log


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "reach", *_OF_PACKED])
def recent_kernel(
    query,
    keys,
    values,
    entries,
    key,
    value,
    starts,
    lengths,
    packed,
    packed_lse,
    sinks,
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
    out_token,
    out_head,
    packed_tokens,
    packed_sequence,
    packed_token,
    packed_head,
    log_sequence,
    log_token,
    log_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    ring: tl.constexpr,
    head_size: tl.constexpr,
    head_size_v: tl.constexpr,
    padded: tl.constexpr,
    padded_v: tl.constexpr,
    operand: tl.constexpr,
    capped: tl.constexpr,
    joins: tl.constexpr,
    by_sequence: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    two_loops: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Attention of a tile of rows (tokens times heads of a group) to their recent tokens.

    Grid: tiles times KV heads times blocks of their query heads, tiles slowest, so that programs
    that run together read whole tokens.

    Args, beside those of `RecentInputs`:
        starts, lengths: int32 `[sequences + 1]` and `[sequences]`, as of `paged_attention`.
        packed, packed_lse: result of attention to the pages, without sinks, and natural logs of
            its denominators in float32; read where `joins`. With `by_sequence` they are those of
            `ResultBySequence`, else `[tokens, heads, Dv]`, which may be `out`, and `[tokens,
            heads]`.
        sinks: `[heads]`, read where `has_sinks`.
        out: `[tokens, heads, Dv]`, contiguous heads.
        packed_tokens: of each sequence, with `by_sequence`; further arguments are strides.
        lse: float32 `[tokens, heads]`, natural logs, written where `has_lse`.
        score_scale, cap: as of `attention_kernel`.
        reach: a row sees the keys less than `reach` positions before it.
        two_loops: for prompts. One loop over the ring's keys, one over the step's, so that loads
            can be pipelined; the order of a row's sums then depends on its tile. The softmax starts
            from the result for the pages, so that its load overlaps with others; else that is
            merged at the end.
    """
    heads_per_tile: tl.constexpr = group if group < block_m else block_m
    tokens_per_tile: tl.constexpr = block_m // heads_per_tile
    head_blocks: tl.constexpr = (group + heads_per_tile - 1) // heads_per_tile
    kv_head = tl.program_id(0) % (kv_heads * head_blocks) // head_blocks
    head_block = tl.program_id(0) % head_blocks

    tile = tl.program_id(0) // (kv_heads * head_blocks)
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
    row_token = row // heads_per_tile
    token = begin_token + row_token
    group_head = head_block * heads_per_tile + row % heads_per_tile
    # Rows past the tile's tokens belong to another program, which writes its result in place.
    inside = (row < tokens_per_tile * heads_per_tile) & (token < query_end) & (group_head < group)
    head = kv_head * group + group_head
    position = first_new + token - start

    # A 64-bit scalar base with 32-bit row offsets takes half the registers.
    begin64 = begin_token.to(tl.int64)
    query += begin64 * query_token
    q = _load(query, row_token * query_token + head * query_head, inside, head_size, padded)
    q = q.to(operand)

    entry = (tl.load(entries + sequence).to(tl.int64) * kv_heads + kv_head) * ring
    key += kv_head * key_head
    value += kv_head * value_head
    end = tl.minimum(length, tl.max(tl.where(inside, position, -1), 0) + 1)
    first = tl.maximum(first_new + begin_token - start - reach + 1, 0)
    top = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.full((block_m,), 0.0, tl.float32)
    acc = tl.full((block_m, padded_v), 0.0, tl.float32)
    if joins:
        packed_row = begin_token
        has_packed = inside
        if by_sequence:
            packed_row = begin_token - query_end + packed_tokens
            has_packed = inside & (packed_row + row_token >= 0)
            packed += sequence.to(tl.int64) * packed_sequence
            packed_lse += sequence.to(tl.int64) * log_sequence
        packed += packed_row.to(tl.int64) * packed_token
        packed_lse += packed_row.to(tl.int64) * log_token
        in_packed = row_token * packed_token + head * packed_head
        in_logs = row_token * log_token + head * log_head
        if two_loops:
            acc, top = _load_packed(
                packed, packed_lse, in_packed, in_logs, has_packed, head_size_v, padded_v
            )
            total = tl.where(top > float("-inf"), 1.0, 0.0)
    sums = (acc, total, top)
    factors = (score_scale, cap)
    if two_loops:
        for begin in tl.range(first, tl.minimum(end, first_new), block_n):
            at = begin + tl.arange(0, block_n)
            live = at < tl.minimum(end, first_new)
            slot = entry + at % ring
            k = _load(keys, slot * head_size, live, head_size, padded)
            v = _load(values, slot * head_size_v, live, head_size_v, padded_v)
            distance = tl.where(live[None, :], position[:, None] - at[None, :], -1)
            sums = _add_keys(
                sums=sums,
                q=q,
                k=k,
                v=v,
                distance=distance,
                reach=reach,
                factors=factors,
                capped=capped,
                operand=operand,
            )
        for begin in tl.range(tl.maximum(first, first_new), end, block_n):
            at = begin + tl.arange(0, block_n)
            live = at < end
            own = (start + at - first_new).to(tl.int64)
            k = _load(key, own * key_token, live, head_size, padded)
            v = _load(value, own * value_token, live, head_size_v, padded_v)
            distance = position[:, None] - at[None, :]
            sums = _add_keys(
                sums=sums,
                q=q,
                k=k,
                v=v,
                distance=distance,
                reach=reach,
                factors=factors,
                capped=capped,
                operand=operand,
            )
    else:
        for begin in tl.range(first // block_n * block_n, end, block_n):
            at = begin + tl.arange(0, block_n)
            live = (at >= first) & (at < end)
            is_new = at >= first_new
            slot = entry + at % ring
            own = (start + at - first_new).to(tl.int64)
            k = _load_either(
                keys, key, slot * head_size, own * key_token, is_new, live, head_size, padded
            )
            v = _load_either(
                values,
                value,
                slot * head_size_v,
                own * value_token,
                is_new,
                live,
                head_size_v,
                padded_v,
            )
            distance = tl.where(live[None, :], position[:, None] - at[None, :], -1)
            sums = _add_keys(
                sums=sums,
                q=q,
                k=k,
                v=v,
                distance=distance,
                reach=reach,
                factors=factors,
                capped=capped,
                operand=operand,
            )
    acc, total, top = sums
    out += begin64 * out_token
    in_out = row_token * out_token + head * out_head
    in_lse = begin64 * (kv_heads * group) + (row_token * (kv_heads * group) + head)
    if joins and not two_loops:
        x, log = _load_packed(
            packed, packed_lse, in_packed, in_logs, has_packed, head_size_v, padded_v
        )
        new_top = tl.maximum(top, log)
        unit = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale, weight = tl.exp2(top - unit), tl.exp2(log - unit)
        acc = acc * rescale[:, None] + x * weight[:, None]
        total, top = total * rescale + weight, new_top
    factor, log = finalize_softmax(top, total, load_sinks(sinks, head, inside, has_sinks))
    columns = tl.arange(0, padded_v)[None, :]
    result = acc * factor[:, None]
    mask = inside[:, None] & (columns < head_size_v)
    tl.store(out + in_out[:, None] + columns, result.to(out.dtype.element_ty), mask=mask)
    if has_lse:
        tl.store(lse + in_lse, log, mask=inside)
