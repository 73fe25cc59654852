"""Prefill: pages unpacked into a bounded workspace, then dense attention, PyTorch's or our own.

With many queries per key, unpacking once costs little compared to attention, and dense kernels are
faster than a kernel that unpacks in its inner loop. A sequence's cached tokens are processed in
blocks, whose results are merged by LSE; the last block holds the new tokens and is causal.

cuDNN (SM90 and later) builds a kernel for every new shape, strides included, in about 50 ms. So
block sizes and query counts are rounded up to a small set; padding queries, and the first rows of a
causal square, are computed and discarded. If a recipe reads the last R tokens from rings, there are
R keys fewer here, and the first R queries of a prompt have no keys and are skipped. If the whole
prompt's length is in that set, the shortened prompt is not padded. On other GPUs, and for head
sizes over 128 except on SM90, PyTorch's FlashAttention is used.

halfbyte's own kernels (`chunks.py`) take sequences longer than their window, soft-caps, K and V
of different head sizes, small heads, and shorter prompts. On SM90 one of them (`sm90/`) attends to
pages and recent tokens at once, and takes most prompts.

Sequences with up to 8 new tokens are split off a batch for other backends. So are those with
somewhat more after a long prefix, because unpacking the prefix would cost more than it saves.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from halfbyte.attention.base import (
    AttentionConfig,
    AttentionInputs,
    GpuAttention,
    Part,
    ResultBySequence,
    SubBatch,
)
from halfbyte.attention.paged.plan import Tiles, choose_row_tiles, triton_target
from halfbyte.attention.prefill.chunks import run_chunks
from halfbyte.attention.prefill.key_ranges import unknown_to_unpack
from halfbyte.attention.prefill.plan import (
    MAX_DECODE_QUERIES,
    MAX_PARTS,
    DensePlan,
    KeyBlock,
    LongSequences,
    make_plan,
    queries_at_once,
    rounded_up,
    workspace_tokens,
)
from halfbyte.attention.prefill.sm90 import launcher as sm90
from halfbyte.dispatch import Answer, current_compute_capability


def uses_cudnn(compute_capability: int, head_size: int) -> bool:
    """Whether PyTorch can use cuDNN's attention; with head sizes over 128 only on SM90."""
    return compute_capability == 90 or (compute_capability > 90 and head_size <= 128)


class DenseAttention(GpuAttention):
    """Splits a batch by sequence; unpacks pages and runs dense attention where it is fastest."""

    name: ClassVar[str] = "dense"
    module: ClassVar[str] = "triton"
    module_source: ClassVar[str] = "pip install halfbyte[gpu]"
    purpose: ClassVar[str] = "unpacks pages for dense attention, for prefill"
    takes_transforms: ClassVar[bool] = True

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Batches with prompts."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens <= MAX_DECODE_QUERIES * config.num_seqs:
            return False, "is for prefill: more than a few query tokens per sequence"
        if config.split_off:
            return False, "unpacking the pages of these sequences does not pay off"
        if config.batch_invariant:
            return False, "rounds differently with the batch"
        if config.query_dtype not in (torch.bfloat16, torch.float16):
            return False, f"query in bfloat16 or float16, not {config.query_dtype}"
        reason = unknown_to_unpack(config.layout)
        return reason is None, reason or cls.purpose

    @classmethod
    def attends_to_recent(cls, inputs: AttentionInputs) -> bool:
        """See `AttentionBackend.attends_to_recent`. On SM90, where `sm90` supports the batch."""
        return inputs.part is not Part.MERGED and sm90.supports(inputs)

    @classmethod
    def split_off(cls, inputs: AttentionInputs) -> Sequence[SubBatch]:
        """See `AttentionBackend.split_off`. The first call of a step reads the lengths back."""
        return plan_of(inputs).split_off

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`. The first call of a step reads the lengths back."""
        run(inputs, plan_of(inputs))

    @classmethod
    def forward_by_sequence(cls, inputs: AttentionInputs) -> ResultBySequence | None:
        """See `AttentionBackend`. For batches that PyTorch's attention computes in one call."""
        plan = plan_of(inputs)
        if inputs.sinks is not None or plan.split_off or plan.chunks or len(plan.long) != 1:
            return None
        (long,) = plan.long
        if long.cached or long.count != inputs.seq_lens.shape[0]:
            return None
        return _run_last(inputs, long)


def run(inputs: AttentionInputs, plan: DensePlan) -> None:
    """Fill `inputs.out`, and `inputs.lse` where it is not None, without `plan.split_off`."""
    if plan.empty is not None:
        _fill_empty(inputs, plan.empty)
    for long in plan.long:
        _run_long(inputs, long)
    tiles = None if plan.on_sm90 else _tiles(inputs)
    for chunks in plan.chunks:
        run_chunks(inputs, chunks, tiles)


def _tiles(inputs: AttentionInputs) -> Tiles:
    layout, target = inputs.layout, triton_target(inputs.query.device)
    return choose_row_tiles(layout.head_size, layout.head_size_v, inputs.sliding_window, target)


class _PlanKey(NamedTuple):
    """What a plan depends on besides the lengths."""

    workspace_tokens: int
    queries_at_once: int
    tokens_per_tile: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int | None
    is_uncapped: bool
    is_positive: bool
    """Whether the scale is positive."""
    on_sm90: bool
    """Whether `sm90` supports it."""
    recent_tokens: int
    """0 if they are merged later, or if there are none."""
    device: torch.device


def plan_of(inputs: AttentionInputs) -> DensePlan:
    """`make_plan`, cached for all layers that share `inputs.plans`."""
    layout, on_sm90 = inputs.layout, sm90.supports(inputs)
    tokens_per_tile = _tiles(inputs).tokens(inputs.query.shape[1] // layout.num_kv_heads)
    key = _PlanKey(
        workspace_tokens=workspace_tokens(inputs),
        queries_at_once=queries_at_once(inputs),
        tokens_per_tile=tokens_per_tile,
        num_heads=inputs.query.shape[1],
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        head_size_v=layout.head_size_v,
        sliding_window=inputs.sliding_window,
        is_uncapped=inputs.softcap is None,
        is_positive=inputs.scale > 0,
        on_sm90=on_sm90,
        recent_tokens=inputs.recent.tokens if inputs.recent else 0,
        device=inputs.query.device,
    )
    return inputs.plans.get(key, lambda: make_plan(inputs, tokens_per_tile, on_sm90))


def _fill_empty(inputs: AttentionInputs, rows: torch.Tensor) -> None:
    # Not by assignment, which copies a scalar from the host and syncs.
    inputs.out.index_fill_(0, rows, 0)
    if inputs.lse is None:
        return
    if inputs.sinks is None:
        inputs.lse.index_fill_(0, rows, -torch.inf)
    else:
        inputs.lse[rows] = inputs.sinks.float()


def _run_long(inputs: AttentionInputs, long: LongSequences) -> None:
    from halfbyte.attention.prefill.combine import combine, join

    queries, last = long.queries, long.last
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if long.cached:
        query = _padded_rows(inputs.query, long.query_begin, rounded_up(queries))[None]
        for block in long.cached:
            out, logs = _run_block(inputs, block, query, causal=False)
            parts.append((out[0, :queries], logs[0, :, :queries]))
            if len(parts) == MAX_PARTS:
                parts = [join(parts)]
    out, logs = _run_last(inputs, long)
    exact = last.size == queries and long.count * queries == inputs.query.shape[0]
    if exact and not parts and inputs.sinks is None and inputs.lse is None:
        inputs.set_output(out.flatten(0, 1))
        return
    for i in range(long.count):
        begin = long.query_begin + i * long.stride
        at = slice(begin, begin + queries)
        combine(
            [*parts, (out[i], logs[i])],
            inputs.sinks,
            inputs.out[at],
            None if inputs.lse is None else inputs.lse[at],
        )


def _run_last(inputs: AttentionInputs, long: LongSequences) -> ResultBySequence:
    """Attention to the causal block."""
    queries, last = long.queries, long.last
    before = last.end - last.begin - queries
    if long.count > 1:
        query = _rows_of(inputs.query, long)
    else:
        query = _padded_rows(inputs.query, long.query_begin - before, last.size)[None]
    out, logs = _run_block(inputs, last, query, causal=True)
    own = slice(before, before + queries)
    return ResultBySequence(out[:, own], logs[:, :, own])


def _run_block(
    inputs: AttentionInputs, block: KeyBlock, query: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _unpack(inputs, block)
    return _dense(query, key, value, causal, inputs.scale)


def _rows_of(query: torch.Tensor, long: LongSequences) -> torch.Tensor:
    """The queries `[count, queries, heads, D]` of a group, contiguous in the last dimension."""
    of_token, of_head, of_dim = query.stride()
    shape = (long.count, long.queries, *query.shape[1:])
    strides = (long.stride * of_token, of_token, of_head, of_dim)
    rows = query[long.query_begin :].as_strided(shape, strides)
    return rows if of_dim == 1 else rows.contiguous()


def _padded_rows(query: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Rows `begin .. begin + count` of the query, contiguous in the last dimension; zeros outside
    of the query."""
    if begin >= 0 and begin + count <= query.shape[0]:
        rows = query[begin : begin + count]
        return rows if rows.stride(2) == 1 else rows.contiguous()
    rows = query.new_empty((count, *query.shape[1:]))
    first, last = max(0, begin) - begin, min(query.shape[0], begin + count) - begin
    rows[:first].zero_()
    rows[first:last] = query[begin + first : begin + last]
    rows[last:].zero_()
    return rows


def _unpack(inputs: AttentionInputs, block: KeyBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[count, size, kv_heads, D]` of a block, zeros where it ends before its size."""
    # Here, because the import needs Triton.
    from halfbyte.attention.prefill.unpack import unpack

    count = block.end - block.begin
    key, value = (x.unflatten(0, (-1, block.size)) for x in unpack(inputs, block.keys))
    if count < block.size:
        # Valid rows give these keys weight 0, but 0 * NaN is NaN.
        key[:, count:].zero_()
        value[:, count:].zero_()
    return key, value


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of `[batch, tokens, heads, D]`, causal from the top left.

    Returns:
        Output `[batch, tokens, heads, D]` and log-denominators `[batch, heads, tokens]`.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not query.is_cuda:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    elif uses_cudnn(current_compute_capability(query.device), query.shape[-1]):
        out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        logs = logs.squeeze(-1)
    else:
        out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2), logs
