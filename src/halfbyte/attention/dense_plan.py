"""How `dense` sorts a batch's sequences, and cuts the keys of the long ones into blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.dense_windows import WindowedChunks, windowed_chunks
from halfbyte.layouts import PageLayout

WORKSPACE_BYTES = 256 * 2**20
"""For unpacked K and V, of which one block at a time is held."""
RESULT_BYTES = 640 * 2**20
"""For what blocks gave the same queries, `MOST_PARTS` and one more, and for the queries."""
MOST_PARTS = 4
"""Results of blocks that are held before they are joined."""
MIN_QUERIES = 512
"""New tokens of a sequence from which unpacking its keys pays."""
FEW_QUERIES = 8
"""New tokens up to which the decode kernels are meant."""
SQUARE_WINDOW = 2048
"""Windows from which squares of cuDNN's are taken instead of FlashAttention."""
_KEY_BLOCKS = (32768, 16384, 8192, 4096, 2048, 1024)
"""Sizes of blocks of cached tokens."""
_FOR_DECODING = ("cuda", "triton", "reference")
_GENERAL = ("triton", "reference")


@dataclass(frozen=True)
class Block:
    """Keys `begin .. end` of some sequences, `size` rows each in the workspace."""

    begin: int
    end: int
    size: int
    begins: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class LongSequences:
    """Sequences of one length that follow each other, to be attended to together.

    More than one only where nothing was cached before: then keys and queries are as many.
    """

    first: int
    count: int
    query_begin: int
    queries: int
    cached: list[Block]
    """Keys that all queries see."""
    edge: Block | None
    """With a window, keys before those: the first query sees all of them, each one after it a key
    less, the last one none."""
    last: Block
    """With the new tokens, causal; tokens cached before them become rows of its square."""


@dataclass(frozen=True)
class OtherSequences:
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
class DensePlan:
    long: list[LongSequences]
    windowed: list[WindowedChunks]
    """In place of those, where a small window is shorter than the sequence."""
    some: list[OtherSequences]


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


def query_parts(
    queries: int, cached: int, window: int | None, most_queries: int
) -> Iterator[tuple[int, int]]:
    """Ranges of a sequence's queries that are attended to at a time.

    With a window each has at most as many, and no range holds both queries that the window hides
    nothing from and others: so the keys that not all of a range see are a triangle.
    """
    begin = 0
    while begin < queries:
        most = most_queries
        if window is not None:
            hides_nothing = window - cached - begin
            most = min(most, hides_nothing if hides_nothing > 0 else window)
        end = min(queries, begin + most)
        yield begin, end
        begin = end


def rounded_up(tokens: int) -> int:
    """The next of four sizes per octave, at least 256."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return max(256, -(-tokens // step) * step)


def make_plan(inputs: AttentionInputs, *, squares: bool) -> DensePlan:
    """How to attend to a batch.

    Args:
        squares: whether sequences that a window is shorter than are cut into causal squares.
    """
    starts = inputs.query_start_loc.tolist()
    lengths = inputs.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    most, most_queries = workspace_tokens(inputs), queries_at_once(inputs)
    window = inputs.sliding_window
    few, general, beyond, long = _sorted(counts, lengths, None if squares else window, most)
    device = inputs.query.device
    some = [
        _some(inputs, backends, [(i, starts[i], counts[i]) for i in indices])
        for backends, indices in ((_FOR_DECODING, few), (_GENERAL, general))
        if indices
    ]
    windowed: list[WindowedChunks] = []
    if window is not None:
        sequences = [(i, starts[i], counts[i], lengths[i]) for i in beyond]
        windowed = windowed_chunks(sequences, window, most, most_queries, device)
    groups: list[list[int]] = []
    for i in long:
        last = groups[-1][-1] if groups else -1
        alike = last == i - 1 and counts[last] == lengths[last] == counts[i] == lengths[i]
        alike = alike and (window is None or lengths[i] <= window)
        # Sequences that are attended to together have one block each, and one result.
        fits = groups and (len(groups[-1]) + 1) * counts[i] <= min(most, 2 * most_queries)
        if alike and fits and counts[i] == rounded_up(counts[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    steps: list[LongSequences] = []
    for group in groups:
        first, n, cached = group[0], counts[group[0]], lengths[group[0]] - counts[group[0]]
        # More queries than the memory is for go one part after the other.
        for begin, end in query_parts(n, cached, window, most_queries):
            at, before = starts[first] + begin, cached + begin
            steps.append(_long(first, len(group), at, end - begin, before, window, most, device))
    return DensePlan(steps, windowed, some)


def _sorted(
    counts: list[int], lengths: list[int], window: int | None, most_tokens: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Indices of sequences: few new tokens, for the general kernel, longer than the window, long.

    Args:
        most_tokens: that the workspace holds; of a window's keys it must hold as many again.
    """
    few: list[int] = []
    general: list[int] = []
    beyond: list[int] = []
    long: list[int] = []
    for i, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        if n < MIN_QUERIES or length < n:
            (few if n <= FEW_QUERIES else general).append(i)
        elif window is None or length <= window:  # which hides nothing
            long.append(i)
        else:
            (beyond if window <= most_tokens // 2 else general).append(i)
    return few, general, beyond, long


def _long(
    first: int,
    count: int,
    query_begin: int,
    queries: int,
    cached: int,
    window: int | None,
    most_tokens: int,
    device: torch.device,
) -> LongSequences:
    length = cached + queries
    seen_by_all = 0 if window is None else max(0, length - window)
    blocks_of_all = key_blocks(cached - seen_by_all, most_tokens)
    ranges = [(seen_by_all + begin, seen_by_all + end, end - begin) for begin, end in blocks_of_all]
    rest = ranges[-1][1] if ranges else seen_by_all
    ranges.append((rest, length, rounded_up(length - rest)))
    has_edge = seen_by_all > 0 and queries > 1
    if has_edge:
        ranges.append((seen_by_all - queries + 1, seen_by_all, rounded_up(queries - 1)))
    # One transfer: the bounds of all blocks, for every sequence.
    numbers = torch.tensor(
        [
            [[begin] * count, [end] * count, [i * size for i in range(count)]]
            for begin, end, size in ranges
        ],
        dtype=torch.int32,
    ).to(device)
    blocks = [Block(*sizes, *on_device) for sizes, on_device in zip(ranges, numbers, strict=True)]
    edge = blocks.pop() if has_edge else None
    return LongSequences(first, count, query_begin, queries, blocks[:-1], edge, blocks[-1])


def _some(
    inputs: AttentionInputs, backends: tuple[str, ...], sequences: list[tuple[int, int, int]]
) -> OtherSequences:
    if len(sequences) == inputs.seq_lens.shape[0]:
        starts = inputs.query_start_loc
        return OtherSequences(backends, None, None, starts, inputs.seq_lens, AttentionPlans())
    device = inputs.query.device
    rows = torch.cat([torch.arange(begin, begin + n) for _, begin, n in sequences])
    starts = torch.tensor([0] + [n for _, _, n in sequences]).cumsum(0)
    indices = torch.tensor([i for i, _, _ in sequences], device=device)
    return OtherSequences(
        backends,
        rows.to(device),
        indices,
        starts.to(device, torch.int32),
        inputs.seq_lens[indices],
        AttentionPlans(),
    )


def queries_at_once(inputs: AttentionInputs) -> int:
    """Of a sequence, so that their keys and all results fit: a size of `rounded_up`."""
    row = inputs.query.shape[1] * inputs.layout.head_size_v * inputs.query.element_size()
    most = min(workspace_tokens(inputs) // 2, RESULT_BYTES // (row * (MOST_PARTS + 2)))
    step = max(64, 1 << max(0, most.bit_length() - 3))
    return max(MIN_QUERIES, most // step * step)


def workspace_tokens(inputs: AttentionInputs) -> int:
    return tokens_that_fit(inputs.layout, inputs.query.dtype)


def tokens_that_fit(layout: PageLayout, dtype: torch.dtype) -> int:
    """Whose K and V, unpacked, the workspace holds."""
    width = layout.num_kv_heads * (layout.head_size + layout.head_size_v)
    return WORKSPACE_BYTES // (width * dtype.itemsize)
