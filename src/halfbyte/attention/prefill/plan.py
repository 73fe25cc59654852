"""How `dense` splits a batch by sequence, and the keys of long sequences into blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs, AttentionPlans, Part, SubBatch
from halfbyte.attention.prefill.chunks import Chunks, make_chunks
from halfbyte.attention.prefill.key_ranges import KeyRanges
from halfbyte.attention.prefill.sm90 import launcher as sm90
from halfbyte.layouts import PageLayout

WORKSPACE_BYTES = 256 * 2**20
"""Max memory for unpacked K and V, one block at a time."""
RESULT_BYTES = 640 * 2**20
"""Max memory for the results of blocks and the queries."""
MAX_PARTS = 4
"""Max results of blocks merged per launch."""
ROWS_HELD = MAX_PARTS + 4
"""Peak memory per query row, in multiples of a row of the output in 16 bits: two merged results in
float32 (4), the other parts (3), and the query (1)."""
MIN_QUERIES = 512
"""Min new tokens of a sequence for PyTorch's attention (measured with cuDNN), unless nothing has to
be padded. It is not used for heads below `MIN_HEAD_SIZE` either, nor for fewer than `MIN_PAIRS`
(query, visible key) pairs."""
MIN_HEAD_SIZE = 80
MIN_PAIRS = 2**21
PAIRS_PER_TOKEN = 1300
"""A sequence without padding counts as its pairs plus this number for every new token when it is
compared with `MIN_PAIRS`, because PyTorch's attention also takes less time per token."""
MIN_SM90_TILES = 128
"""Min tiles for the kernel of `sm90`, about one per SM, but for `recent`. With fewer, batches are
divided as elsewhere: the Triton kernel has shorter steps."""
MIN_CHUNK = 128
"""Min new tokens for which unpacking all keys of a sequence pays off, whatever their number."""
MAX_KEYS_PER_QUERY = 64
"""Max cached keys per new token for which unpacking pays off with fewer new tokens."""
TILE_ROWS = 64
MIN_GENERAL_HEADS = 192
MIN_GENERAL_KEYS = 256
"""Unpacking does not pay off for sequences whose queries fit in one tile of the `triton` backend
and which have at least MIN_GENERAL_KEYS cached keys, if their KV heads are MIN_GENERAL_HEADS in
total: these fill the GPU without unpacking."""
EMPTY_MULTIPLE = 16
"""A prompt whose first rows attend to nothing needs no padding if their number is a multiple of
this. Usual numbers of recent tokens are; cuDNN would have to build a kernel for each other one."""
MAX_DECODE_QUERIES = 8
"""Max new tokens of a sequence for the decode backends."""
_KEY_BLOCKS = (32768, 16384, 8192, 4096, 2048, 1024)
"""Sizes of blocks of cached tokens."""


@dataclass(frozen=True)
class KeyBlock:
    """Keys `begin .. end` of a group of sequences, `size` rows of the workspace for each."""

    begin: int
    end: int
    size: int
    keys: KeyRanges


@dataclass(frozen=True)
class LongSequences:
    """Consecutive sequences of equal length, computed in one call of PyTorch's attention.

    More than one only if none has cached tokens: then there are as many keys as queries.
    """

    first: int
    count: int
    query_begin: int
    queries: int
    stride: int
    """Rows from a sequence's first query to the next one's: also those that attend to nothing."""
    cached: list[KeyBlock]
    """Keys that all queries see."""
    last: KeyBlock
    """The causal block with the new tokens; cached tokens in it add (discarded) query rows."""


@dataclass(frozen=True)
class DensePlan:
    long: list[LongSequences]
    chunks: list[Chunks]
    """Work of halfbyte's own kernel."""
    on_sm90: bool
    """Whether that is the kernel of `sm90`; else the one in Triton."""
    split_off: list[SubBatch]
    """Decode steps, and sequences whose pages are better not unpacked; in batches whose recent
    tokens are read here, too, also those whose keys the workspace cannot hold."""
    empty: torch.Tensor | None = None
    """Rows of the query before the start of their sequence, which attend to nothing."""


def key_blocks(cached: int, max_tokens: int) -> list[tuple[int, int]]:
    """Split cached tokens, which all queries see, into ranges of sizes from `_KEY_BLOCKS`.

    A rest smaller than the smallest size is left for the causal block.

    Args:
        cached: tokens before the queries.
        max_tokens: capacity of the workspace.
    """
    blocks, begin = [], 0
    for size in _KEY_BLOCKS:
        while size <= min(cached - begin, max_tokens):
            blocks.append((begin, begin + size))
            begin += size
    return blocks


def rounded_up(tokens: int) -> int:
    """Rounded up to one of four sizes per power of two; at least 256."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return max(256, -(-tokens // step) * step)


def make_plan(inputs: AttentionInputs, tokens_per_tile: int, on_sm90: bool = False) -> DensePlan:
    """How to attend to a batch.

    Args:
        tokens_per_tile: query tokens that a program of our own kernel in Triton takes.
        on_sm90: whether `sm90` supports the inputs. It is required for `recent`.
    """
    starts = inputs.query_start_loc.tolist()
    lengths = inputs.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    # A sequence shorter than its queries begins with rows that attend to nothing.
    beyond = [max(0, n - length) for n, length in zip(counts, lengths, strict=True)]
    starts = [start + n for start, n in zip(starts, beyond, strict=False)]
    counts = [n - less for n, less in zip(counts, beyond, strict=True)]
    max_tokens, max_queries = workspace_tokens(inputs), queries_at_once(inputs)
    window = inputs.sliding_window
    prompts = [Prompt(*p) for p in zip(starts, counts, lengths, beyond, strict=False)]
    taken = _sorted(prompts, inputs, on_sm90)
    if on_sm90 and inputs.recent is None and _tiles_on_sm90(inputs, counts, taken) < MIN_SM90_TILES:
        on_sm90, taken = False, _sorted(prompts, inputs, False)
    decode, general, short, long, merged = taken
    device = inputs.query.device
    is_whole = not any(beyond)
    split_off = [
        _sub_batch(inputs, [(i, starts[i], counts[i]) for i in indices], is_whole)
        for indices in (decode, general, merged)
        if indices
    ]
    if merged:
        split_off[-1] = replace(split_off[-1], part=Part.MERGED)
    sequences = [(i, starts[i], counts[i], lengths[i]) for i in short]
    recent = inputs.recent.tokens if inputs.recent else 0
    if on_sm90:
        tokens_per_tile = _tokens_on_sm90(inputs)
    chunks = make_chunks(sequences, window, max_tokens, tokens_per_tile, device, recent)
    steps = [
        step
        for group in long
        for step in _long(group, prompts[group[0]], max_queries, max_tokens, device)
    ]
    rows = [
        torch.arange(start - n, start, device="cpu")
        for start, n in zip(starts, beyond, strict=True)
    ]
    empty = None if is_whole else torch.cat(rows).to(device)
    return DensePlan(steps, chunks, on_sm90, split_off, empty)


def _tokens_on_sm90(inputs: AttentionInputs) -> int:
    """Max query tokens of a tile there."""
    layout = inputs.layout
    return sm90.tokens_of_tile(inputs.query.shape[1] // layout.num_kv_heads, layout.head_size)


def _tiles_on_sm90(inputs: AttentionInputs, counts: list[int], taken: "_Sorted") -> int:
    """Tiles of the sequences that its kernel would take."""
    tokens = _tokens_on_sm90(inputs)
    return inputs.layout.num_kv_heads * sum(-(-counts[i] // tokens) for i in taken.short)


class Prompt(NamedTuple):
    """A sequence of a batch."""

    start: int
    """Row of its first query that attends to something."""
    queries: int
    length: int
    empty: int
    """Rows in front of `start` that attend to nothing."""

    @property
    def is_exact(self) -> bool:
        """Whether it has no cached tokens, and its shape needs no padding."""
        if self.queries != self.length:
            return False
        rows = self.queries + self.empty
        whole = rows == rounded_up(rows) and self.empty % EMPTY_MULTIPLE == 0
        return whole or self.queries == rounded_up(self.queries)

    def is_followed_by(self, other: "Prompt") -> bool:
        """Whether the other one has the same shape and the next rows."""
        begin = self.start + self.queries + self.empty
        return self[1:] == other[1:] and begin == other.start


class _Sorted(NamedTuple):
    """Indices of sequences, by what takes them."""

    decode: list[int]
    """Decode kernels."""
    general: list[int]
    """The kernel that unpacks in its inner loop."""
    short: list[int]
    """Halfbyte's own dense kernel."""
    long: list[range]
    """Groups for single calls of PyTorch's attention."""
    merged: list[int]
    """Those of `DensePlan.split_off` that are `Part.MERGED`."""


def _sorted(prompts: list[Prompt], inputs: AttentionInputs, on_sm90: bool) -> _Sorted:
    decode: list[int] = []
    merged: list[int] = []
    general: list[int] = []
    one_tile: list[int] = []
    short: list[int] = []
    long: list[range] = []
    layout, window, max_tokens = inputs.layout, inputs.sliding_window, workspace_tokens(inputs)
    recent = inputs.recent.tokens if inputs.recent else 0
    queries_per_tile = TILE_ROWS * layout.num_kv_heads // inputs.query.shape[1]
    # PyTorch's causal mask sets logits to -inf before the scale multiplies them.
    plain = inputs.softcap is None and inputs.scale > 0
    plain = plain and layout.head_size == layout.head_size_v
    # Each sequence of a group has one block and one result.
    for group in _groups(prompts, min(max_tokens, 2 * queries_at_once(inputs))):
        prompt = prompts[group[0]]
        n, length = prompt.queries, prompt.length
        hides = window is not None and window < length
        cached = (min(length, window + n) if window is not None else length) - n
        # The workspace must hold the window's keys plus as many new ones.
        fits = length - recent <= max_tokens
        if window is not None and hides:
            fits = window <= max_tokens // 2
        suits = not on_sm90 and _suits_pytorch(prompt, len(group), layout)
        suits = suits or (not fits and n >= MIN_CHUNK)
        if n <= MAX_DECODE_QUERIES:
            decode += group
        elif recent and not fits and n >= MIN_CHUNK:
            merged += group
        elif plain and not hides and suits and not recent:
            long.append(group)
        elif fits and (n >= MIN_CHUNK or cached <= n * MAX_KEYS_PER_QUERY):
            is_one_tile = not hides and n <= queries_per_tile and cached >= MIN_GENERAL_KEYS
            (one_tile if is_one_tile else short).extend(group)
        else:
            general += group
    if len(one_tile) * layout.num_kv_heads >= MIN_GENERAL_HEADS:
        general = sorted([*general, *one_tile])
    else:
        short = sorted([*short, *one_tile])
    return _Sorted(decode, general, short, long, merged)


def _groups(prompts: list[Prompt], max_queries: int) -> list[range]:
    """Group sequences that one call of PyTorch's attention could take: equal lengths, no padding,
    rows side by side, at most `max_queries` queries in total. All others are groups of one."""
    groups: list[range] = []
    for i, prompt in enumerate(prompts):
        last = groups[-1] if groups else range(0)
        alike = last and prompt.is_exact and prompts[i - 1].is_followed_by(prompt)
        if alike and (len(last) + 1) * prompt.queries <= max_queries:
            groups[-1] = range(last[0], i + 1)
        else:
            groups.append(range(i, i + 1))
    return groups


def _suits_pytorch(prompt: Prompt, count: int, layout: PageLayout) -> bool:
    """Whether PyTorch's attention is faster than the Triton kernel for a group of `count`
    sequences."""
    queries, exact = prompt.queries, prompt.is_exact
    pairs = queries * (prompt.length - queries // 2)
    work = count * (pairs + queries * PAIRS_PER_TOKEN) if exact else pairs
    many = exact or queries >= MIN_QUERIES
    return layout.head_size >= MIN_HEAD_SIZE and many and work >= MIN_PAIRS


def _long(
    group: range, prompt: Prompt, max_queries: int, max_tokens: int, device: torch.device
) -> Iterator[LongSequences]:
    """Calls for a group of sequences like `prompt`, its first; queries that exceed the memory bound
    are processed in parts."""
    cached = prompt.length - prompt.queries
    for begin in range(0, prompt.queries, max_queries):
        queries = min(max_queries, prompt.queries - begin)
        exact = prompt.is_exact and queries == prompt.queries
        blocks = _blocks(group, cached + begin, queries, exact, max_tokens, device)
        yield LongSequences(
            first=group[0],
            count=len(group),
            query_begin=prompt.start + begin,
            queries=queries,
            stride=prompt.queries + prompt.empty,
            cached=blocks[:-1],
            last=blocks[-1],
        )


def _blocks(
    group: range, cached: int, queries: int, exact: bool, max_tokens: int, device: torch.device
) -> list[KeyBlock]:
    """Blocks of the keys of a group of sequences.

    Args:
        cached: tokens before the queries.
        exact: whether the last block has no padding.
    """
    length, count = cached + queries, len(group)
    ranges = [(begin, end, end - begin) for begin, end in key_blocks(cached, max_tokens)]
    rest = ranges[-1][1] if ranges else 0
    ranges.append((rest, length, length if exact else rounded_up(length - rest)))
    # One transfer: the bounds of all blocks, for every sequence.
    numbers = torch.tensor(
        [
            [[begin] * count, [end] * count, [i * size for i in range(count)]]
            for begin, end, size in ranges
        ],
        dtype=torch.int32,
        device="cpu",
    ).to(device)
    sequences = slice(group[0], group[0] + count)
    return [
        KeyBlock(
            begin,
            end,
            size,
            KeyRanges(sequences, count * size, end - begin, *on_device),
        )
        for (begin, end, size), on_device in zip(ranges, numbers, strict=True)
    ]


def _sub_batch(
    inputs: AttentionInputs, sequences: list[tuple[int, int, int]], is_whole: bool
) -> SubBatch:
    """Sequences given by number, first row of the query and new tokens."""
    if is_whole and len(sequences) == inputs.seq_lens.shape[0]:
        return SubBatch(None, None, inputs.query_start_loc, inputs.seq_lens, AttentionPlans())
    device = inputs.query.device
    rows = torch.cat([torch.arange(begin, begin + n, device="cpu") for _, begin, n in sequences])
    starts = torch.tensor([0] + [n for _, _, n in sequences], device="cpu").cumsum(0)
    indices = torch.tensor([i for i, _, _ in sequences], device=device)
    return SubBatch(
        rows.to(device),
        indices,
        starts.to(device, torch.int32),
        inputs.seq_lens[indices],
        AttentionPlans(),
    )


def queries_at_once(inputs: AttentionInputs) -> int:
    """Max queries per pass, so that keys and all results fit; a size of `rounded_up`."""
    row = inputs.query.shape[1] * inputs.layout.head_size_v * inputs.query.element_size()
    max_tokens = min(workspace_tokens(inputs) // 2, RESULT_BYTES // (row * ROWS_HELD))
    step = max(64, 1 << max(0, max_tokens.bit_length() - 3))
    return max(MIN_QUERIES, max_tokens // step * step)


def workspace_tokens(inputs: AttentionInputs) -> int:
    """Capacity of the workspace in tokens of unpacked K and V."""
    layout = inputs.layout
    width = layout.num_kv_heads * (layout.head_size + layout.head_size_v)
    return WORKSPACE_BYTES // (width * inputs.query.element_size())
