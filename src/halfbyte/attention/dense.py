"""Prefill: pages unpacked into a bounded workspace, then PyTorch's dense attention.

Where many queries share the keys, unpacking once costs little beside the attention, and dense
kernels reach speeds that a kernel which unpacks in its inner loop does not. A sequence's cached
tokens are taken in blocks, each attended to by itself and joined by the logs of the softmax
denominators; the last block holds the new tokens and is causal.

cuDNN (SM90 and later) builds a kernel for every new shape in about 50 ms, so that blocks and
numbers of queries are rounded to few sizes. Queries that only pad, and those of a causal square's
first rows, are computed and thrown away. Elsewhere PyTorch's FlashAttention does the same work.

A batch may hold prompts and decoding sequences. They are sorted here: sequences of few new tokens
go to the kernels for decoding, short prompts to the general one.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from halfbyte.attention.base import (
    AttentionBackend,
    AttentionConfig,
    AttentionInputs,
    AttentionPlans,
)
from halfbyte.attention.interface import run
from halfbyte.dispatch import CPU, Answer, current_compute_capability, is_installed

WORKSPACE_BYTES = 256 * 2**20
"""For unpacked K and V, of which one block at a time is held."""
MIN_QUERIES = 512
"""New tokens of a sequence from which unpacking its keys pays."""
_FEW_QUERIES = 8
"""New tokens up to which the decode kernels are meant."""
_KEY_BLOCKS = (32768, 16384, 8192, 4096, 2048, 1024)
"""Sizes of blocks of cached tokens."""
_CUDNN = 90
_MOST_PARTS = 4
"""Results of blocks that are held before they are joined."""
_FOR_DECODING = ("cuda", "triton", "reference")
_FOR_SHORT_PROMPTS = ("triton", "reference")


@dataclass(frozen=True)
class _Block:
    """Keys `begin .. end` of some sequences, `size` rows each in the workspace."""

    begin: int
    end: int
    size: int
    begins: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class _Long:
    """Sequences of one length that follow each other, to be attended to together.

    More than one only where nothing was cached before: then keys and queries are as many.
    """

    first: int
    count: int
    query_begin: int
    queries: int
    cached: list[_Block]
    last: _Block
    """With the new tokens, causal; tokens cached before them become rows of its square."""


@dataclass(frozen=True)
class _Some:
    """Sequences that another backend takes: their own batch, and where their rows stand."""

    backends: tuple[str, ...]
    """Names, best first."""
    rows: torch.Tensor | None
    """Of the query; None for all of them, in their order."""
    sequences: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    plans: AttentionPlans


@dataclass(frozen=True)
class _Plan:
    long: list[_Long]
    some: list[_Some]


class DenseAttention(AttentionBackend):
    """Sorts a batch's sequences; unpacks for those that PyTorch's dense attention does best."""

    name: ClassVar[str] = "dense"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later, with Triton."""
        here = compute_capability is None
        capability = current_compute_capability() if here else compute_capability
        assert capability is not None
        if capability == CPU:
            return False, "needs an NVIDIA GPU"
        if capability < 80:
            return False, f"needs compute capability 8.0, this is {capability / 10}"
        if here and not is_installed("triton"):
            return False, "needs Triton: pip install halfbyte[gpu]"
        return True, "unpacks pages for PyTorch's attention, for prefill"

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """Batches with prompts in them."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.num_tokens <= _FEW_QUERIES * config.num_seqs:
            return False, "is for prefill: more than a few query tokens per sequence"
        if config.batch_invariant:
            return False, "rounds differently with the batch"
        layout = config.layout
        if config.sliding_window is not None or config.softcap is not None:
            return False, "has no windows and no soft-cap"
        if layout.head_size != layout.head_size_v:
            return False, f"K and V of one head size, not {layout.head_size}, {layout.head_size_v}"
        if layout.head_size % 16 or layout.head_size > 256:
            return False, f"head sizes up to 256 that 16 divides, not {layout.head_size}"
        if config.query_dtype not in (torch.bfloat16, torch.float16):
            return False, f"query in bfloat16 or float16, not {config.query_dtype}"
        return True, "unpacks pages for PyTorch's attention, for prefill"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`. The first call of a step reads the lengths back."""
        key = ("dense", _workspace_tokens(inputs), inputs.query.device)
        plan = inputs.plans.get(key, lambda: _plan(inputs))
        for some in plan.some:
            _attend_some(inputs, some)
        for long in plan.long:
            _attend_long(inputs, long)


def key_blocks(cached: int, most_tokens: int) -> list[tuple[int, int]]:
    """Ranges of cached tokens that all queries see, in sizes of `_KEY_BLOCKS`; fewer than the
    smallest of these are left for the causal block.

    Args:
        cached: tokens before the queries.
        most_tokens: that the workspace holds.
    """
    blocks, begin = [], 0
    for size in _KEY_BLOCKS:
        while size <= min(cached - begin, most_tokens):
            blocks.append((begin, begin + size))
            begin += size
    return blocks


def rounded_up(tokens: int) -> int:
    """The next of four sizes per octave, at least 256."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return max(256, -(-tokens // step) * step)


def _plan(inputs: AttentionInputs) -> _Plan:
    starts = inputs.query_start_loc.tolist()
    lengths = inputs.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    few: list[int] = []
    medium: list[int] = []
    long: list[int] = []
    for i, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        if n >= MIN_QUERIES and length >= n:
            long.append(i)
        else:
            (few if n <= _FEW_QUERIES else medium).append(i)
    most = _workspace_tokens(inputs)
    groups: list[list[int]] = []
    for i in long:
        last = groups[-1][-1] if groups else -1
        alike = last == i - 1 and counts[last] == lengths[last] == counts[i] == lengths[i]
        fits = groups and (len(groups[-1]) + 1) * counts[i] <= most
        if alike and fits and counts[i] == rounded_up(counts[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    device = inputs.query.device
    steps: list[_Long] = []
    for group in groups:
        first, n, cached = group[0], counts[group[0]], lengths[group[0]] - counts[group[0]]
        # More queries than half the workspace holds go one part after the other.
        for begin in range(0, n, most // 2):
            queries = min(most // 2, n - begin)
            at = starts[first] + begin
            steps.append(_long(first, len(group), at, queries, cached + begin, most, device))
    return _Plan(
        steps,
        [
            _some(inputs, backends, [(i, starts[i], counts[i]) for i in indices])
            for backends, indices in ((_FOR_DECODING, few), (_FOR_SHORT_PROMPTS, medium))
            if indices
        ],
    )


def _long(
    first: int,
    count: int,
    query_begin: int,
    queries: int,
    cached: int,
    most_tokens: int,
    device: torch.device,
) -> _Long:
    ranges = [(begin, end, end - begin) for begin, end in key_blocks(cached, most_tokens)]
    rest, length = ranges[-1][1] if ranges else 0, cached + queries
    ranges.append((rest, length, rounded_up(length - rest)))
    # One transfer: the bounds of all blocks, for every sequence.
    numbers = torch.tensor(
        [
            [[begin] * count, [end] * count, [i * size for i in range(count)]]
            for begin, end, size in ranges
        ],
        dtype=torch.int32,
    ).to(device)
    blocks = [_Block(*sizes, *on_device) for sizes, on_device in zip(ranges, numbers, strict=True)]
    return _Long(first, count, query_begin, queries, blocks[:-1], blocks[-1])


def _some(
    inputs: AttentionInputs, backends: tuple[str, ...], sequences: list[tuple[int, int, int]]
) -> _Some:
    if len(sequences) == inputs.seq_lens.shape[0]:
        starts = inputs.query_start_loc
        return _Some(backends, None, None, starts, inputs.seq_lens, AttentionPlans())
    device = inputs.query.device
    rows = torch.cat([torch.arange(begin, begin + n) for _, begin, n in sequences])
    starts = torch.tensor([0] + [n for _, _, n in sequences]).cumsum(0)
    indices = torch.tensor([i for i, _, _ in sequences], device=device)
    return _Some(
        backends,
        rows.to(device),
        indices,
        starts.to(device, torch.int32),
        inputs.seq_lens[indices],
        AttentionPlans(),
    )


def _attend_some(inputs: AttentionInputs, some: _Some) -> None:
    """Hand some sequences to the backend that is best for them."""
    if some.rows is None:
        run(inputs, among=some.backends)
        return
    batch = replace(
        inputs,
        query=inputs.query[some.rows],
        query_start_loc=some.query_start_loc,
        seq_lens=some.seq_lens,
        block_tables=inputs.block_tables[some.sequences],
        given_out=None,
        lse=None if inputs.lse is None else inputs.lse[some.rows],
        plans=some.plans,
    )
    run(batch, among=some.backends)
    inputs.out[some.rows] = batch.out
    if inputs.lse is not None and batch.lse is not None:
        inputs.lse[some.rows] = batch.lse


def _attend_long(inputs: AttentionInputs, long: _Long) -> None:
    from halfbyte.kernels.combine import combine, join

    queries, last = long.queries, long.last
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if long.cached:
        query = _padded_rows(inputs.query, long.query_begin, rounded_up(queries))[None]
        for block in long.cached:
            out, logs = _attend_block(inputs, long, block, query, causal=False)
            parts.append((out[0, :queries], logs[0, :, :queries]))
            if len(parts) == _MOST_PARTS:
                parts = [join(parts)]
    before = last.end - last.begin - queries
    query = _padded_rows(inputs.query, long.query_begin - before, long.count * last.size)
    query = query.unflatten(0, (-1, last.size))
    out, logs = _attend_block(inputs, long, last, query, causal=True)
    exact = last.size == queries and long.count * queries == inputs.query.shape[0]
    if exact and not parts and inputs.sinks is None and inputs.lse is None:
        inputs.answer(out.flatten(0, 1))
        return
    own = slice(before, before + queries)
    for i in range(long.count):
        at = slice(long.query_begin + i * queries, long.query_begin + (i + 1) * queries)
        combine(
            [*parts, (out[i, own], logs[i, :, own])],
            inputs.sinks,
            inputs.out[at],
            None if inputs.lse is None else inputs.lse[at],
        )


def _attend_block(
    inputs: AttentionInputs, long: _Long, block: _Block, query: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _unpack(inputs, long, block)
    return _dense(query, key, value, causal, inputs.scale)


def _workspace_tokens(inputs: AttentionInputs) -> int:
    layout = inputs.layout
    width = layout.num_kv_heads * (layout.head_size + layout.head_size_v)
    return WORKSPACE_BYTES // (width * inputs.query.element_size())


def _padded_rows(query: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Rows `begin .. begin + count` of the query; beyond its ends, zeros."""
    if begin >= 0 and begin + count <= query.shape[0]:
        return query[begin : begin + count]
    rows = query.new_zeros((count, *query.shape[1:]))
    first, last = max(0, begin), min(query.shape[0], begin + count)
    rows[first - begin : last - begin] = query[first:last]
    return rows


def _unpack(
    inputs: AttentionInputs, long: _Long, block: _Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[count, size, kv_heads, D]` of a block, zeros where it ends before its size."""
    from halfbyte.kernels.unpack import unpack_tokens

    layout = inputs.layout
    shape = (long.count, block.size, layout.num_kv_heads, layout.head_size)
    key, value = inputs.query.new_empty(shape), inputs.query.new_empty(shape)
    count = block.end - block.begin
    if count < block.size:
        # Causal rows that count do not see them, but 0 * NaN is NaN.
        key[:, count:].zero_()
        value[:, count:].zero_()
    unpack_tokens(
        inputs.pages,
        layout,
        inputs.block_tables[long.first : long.first + long.count],
        block.begins,
        block.ends,
        block.rows,
        inputs.k_scale,
        inputs.v_scale,
        key.flatten(0, 1),
        value.flatten(0, 1),
        max_tokens=count,
    )
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
    elif current_compute_capability(query.device) >= _CUDNN:
        out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        logs = logs.squeeze(-1)
    else:
        out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2), logs
