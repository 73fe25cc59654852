"""How `dense` sorts a batch's sequences, and cuts the keys of the long ones into blocks."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.prefill.chunks import Chunks, make_chunks
from halfbyte.layouts import PageLayout

WORKSPACE_BYTES = 256 * 2**20
"""For unpacked K and V, of which one block at a time is held."""
RESULT_BYTES = 640 * 2**20
"""For what blocks gave the same queries, and for the queries."""
MAX_PARTS = 4
"""Max results of blocks that one launch joins."""
ROWS_HELD = MAX_PARTS + 4
"""Then, in rows of the query: what was joined before and what is being joined are in float32, all
but one of the others in 16 bits; and the queries."""
MIN_QUERIES = 512
"""New tokens of a sequence from which PyTorch's attention can be the faster, with cuDNN: if heads
have `MIN_HEAD_SIZE`, and queries see `MIN_PAIRS` keys in all."""
MIN_HEAD_SIZE = 80
MIN_PAIRS = 2**21
PAIRS_OF_TOKEN = 1300
"""It takes longer to begin than our own kernel, less for a token: where there is nothing to pad,
however few tokens a sequence has, each of them counts as so many pairs."""
MIN_CHUNK = 128
"""New tokens of a sequence from which unpacking its keys pays, however many."""
KEYS_PER_QUERY = 64
"""Cached keys per new token up to which it pays for fewer."""
ROWS_OF_A_TILE = 64
MANY_HEADS = 192
MANY_KEYS = 256
"""It does not pay for so many KV heads of sequences whose queries are one tile of the general
kernel each, behind as many cached keys: together they fill the GPU anyway."""
FEW_QUERIES = 8
"""New tokens up to which the decode kernels are meant."""
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
    chunks: list[Chunks]
    """What our own kernel attends to."""
    some: list[OtherSequences]
    empty: torch.Tensor | None = None
    """Rows of the query before their sequence's beginning, which attend to nothing."""


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


def make_plan(inputs: AttentionInputs, tokens_per_tile: int) -> DensePlan:
    """How to attend to a batch.

    Args:
        tokens_per_tile: query tokens that a program of our own kernel takes.
    """
    starts = inputs.query_start_loc.tolist()
    lengths = inputs.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    # A sequence shorter than its queries begins with rows that attend to nothing.
    beyond = [max(0, n - length) for n, length in zip(counts, lengths, strict=True)]
    starts = [start + n for start, n in zip(starts, beyond, strict=False)]
    counts = [n - less for n, less in zip(counts, beyond, strict=True)]
    most, most_queries = workspace_tokens(inputs), queries_at_once(inputs)
    window = inputs.sliding_window
    few, general, short, long = _sorted(starts, counts, lengths, inputs)
    device = inputs.query.device
    is_whole = not any(beyond)
    some = [
        _some(inputs, backends, [(i, starts[i], counts[i]) for i in indices], is_whole)
        for backends, indices in ((_FOR_DECODING, few), (_GENERAL, general))
        if indices
    ]
    sequences = [(i, starts[i], counts[i], lengths[i]) for i in short]
    chunks = make_chunks(sequences, window, most, tokens_per_tile, device)
    steps: list[LongSequences] = []
    for group in long:
        first, n, cached = group[0], counts[group[0]], lengths[group[0]] - counts[group[0]]
        # More queries than the memory is for go one part after the other.
        for begin in range(0, n, most_queries):
            at, queries = starts[first] + begin, min(most_queries, n - begin)
            steps.append(_long(first, len(group), at, queries, cached + begin, most, device))
    rows = [
        torch.arange(start - n, start, device="cpu")
        for start, n in zip(starts, beyond, strict=True)
    ]
    empty = None if is_whole else torch.cat(rows).to(device)
    return DensePlan(steps, chunks, some, empty)


def _sorted(
    starts: list[int], counts: list[int], lengths: list[int], inputs: AttentionInputs
) -> tuple[list[int], list[int], list[int], list[range]]:
    """Indices of sequences: few new tokens, for the general kernel, for our own; and groups of them
    that PyTorch's attention takes at once."""
    few: list[int] = []
    general: list[int] = []
    one_tile: list[int] = []
    short: list[int] = []
    long: list[range] = []
    layout, window, most = inputs.layout, inputs.sliding_window, workspace_tokens(inputs)
    queries_per_tile = ROWS_OF_A_TILE * layout.num_kv_heads // inputs.query.shape[1]
    # PyTorch's causal masks are hidden keys' logits of -inf, before a scale multiplies them.
    plain = inputs.softcap is None and inputs.scale > 0
    plain = plain and layout.head_size == layout.head_size_v
    # Sequences that are attended to together have one block each, and one result.
    for group in _groups(starts, counts, lengths, min(most, 2 * queries_at_once(inputs))):
        n, length = counts[group[0]], lengths[group[0]]
        hides = window is not None and window < length
        cached = (min(length, window + n) if window is not None else length) - n
        # Of a window's keys the workspace must hold as many again.
        fits = window <= most // 2 if window is not None and hides else length <= most
        suits = _suits_pytorch(n, length, len(group), layout) or (not fits and n >= MIN_CHUNK)
        if n <= FEW_QUERIES:
            few += group
        elif plain and not hides and suits:
            long.append(group)
        elif fits and (n >= MIN_CHUNK or cached <= n * KEYS_PER_QUERY):
            is_one_tile = not hides and n <= queries_per_tile and cached >= MANY_KEYS
            (one_tile if is_one_tile else short).extend(group)
        else:
            general += group
    if len(one_tile) * layout.num_kv_heads >= MANY_HEADS:
        general = sorted([*general, *one_tile])
    else:
        short = sorted([*short, *one_tile])
    return few, general, short, long


def _groups(
    starts: list[int], counts: list[int], lengths: list[int], most_queries: int
) -> list[range]:
    """Sequences that PyTorch's attention could take at once: alike, with nothing to pad, their rows
    in a row, and of at most so many queries; all others one by one."""
    groups: list[range] = []
    for i, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        last = groups[-1] if groups else range(0)
        alike = last and counts[last[0]] == lengths[last[0]] == n == length
        alike = alike and starts[i - 1] + counts[i - 1] == starts[i]
        if alike and _is_exact(n, length) and (len(last) + 1) * n <= most_queries:
            groups[-1] = range(last[0], i + 1)
        else:
            groups.append(range(i, i + 1))
    return groups


def _is_exact(queries: int, length: int) -> bool:
    """Whether there is nothing to pad."""
    return queries == length == rounded_up(queries)


def _suits_pytorch(queries: int, length: int, count: int, layout: PageLayout) -> bool:
    """Whether PyTorch's attention is the faster for a group of as many sequences."""
    pairs = queries * (length - queries // 2)
    exact = _is_exact(queries, length)
    work = count * (pairs + queries * PAIRS_OF_TOKEN) if exact else pairs
    many = exact or queries >= MIN_QUERIES
    return layout.head_size >= MIN_HEAD_SIZE and many and work >= MIN_PAIRS


def _long(
    first: int,
    count: int,
    query_begin: int,
    queries: int,
    cached: int,
    most_tokens: int,
    device: torch.device,
) -> LongSequences:
    length = cached + queries
    ranges = [(begin, end, end - begin) for begin, end in key_blocks(cached, most_tokens)]
    rest = ranges[-1][1] if ranges else 0
    ranges.append((rest, length, rounded_up(length - rest)))
    # One transfer: the bounds of all blocks, for every sequence.
    numbers = torch.tensor(
        [
            [[begin] * count, [end] * count, [i * size for i in range(count)]]
            for begin, end, size in ranges
        ],
        dtype=torch.int32,
        device="cpu",
    ).to(device)
    blocks = [Block(*sizes, *on_device) for sizes, on_device in zip(ranges, numbers, strict=True)]
    return LongSequences(first, count, query_begin, queries, blocks[:-1], blocks[-1])


def _some(
    inputs: AttentionInputs,
    backends: tuple[str, ...],
    sequences: list[tuple[int, int, int]],
    is_whole: bool,
) -> OtherSequences:
    if is_whole and len(sequences) == inputs.seq_lens.shape[0]:
        starts = inputs.query_start_loc
        return OtherSequences(backends, None, None, starts, inputs.seq_lens, AttentionPlans())
    device = inputs.query.device
    rows = torch.cat([torch.arange(begin, begin + n, device="cpu") for _, begin, n in sequences])
    starts = torch.tensor([0] + [n for _, _, n in sequences], device="cpu").cumsum(0)
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
    most = min(workspace_tokens(inputs) // 2, RESULT_BYTES // (row * ROWS_HELD))
    step = max(64, 1 << max(0, most.bit_length() - 3))
    return max(MIN_QUERIES, most // step * step)


def workspace_tokens(inputs: AttentionInputs) -> int:
    """Whose K and V, unpacked, the workspace holds."""
    layout = inputs.layout
    width = layout.num_kv_heads * (layout.head_size + layout.head_size_v)
    return WORKSPACE_BYTES // (width * inputs.query.element_size())
