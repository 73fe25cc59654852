"""Prefill with halfbyte's kernels: unpacks the keys that new tokens see, then attends to them.

One launch unpacks the keys of as many sequences as fit in the workspace, a second one computes
attention: on SM90 the kernel of `sm90/`, which takes most prompts, else the one in Triton, for
cases that PyTorch's dense attention does not support or is slower at (windows, soft-caps, K and V
of different head sizes, short prompts).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from halfbyte.attention.base import AttentionInputs
from halfbyte.attention.paged.plan import Tiles
from halfbyte.attention.prefill.key_ranges import KeyRanges
from halfbyte.attention.prefill.sm90.launcher import run_tiles

_MAX_CHUNKS = 32768
"""Max chunks per unpack launch (CUDA's grid limit is 65,535)."""


class Chunk(NamedTuple):
    """New tokens of a sequence, and the keys that they see."""

    sequence: int
    query_begin: int
    """First row of the query."""
    queries: int
    key_begin: int
    """Position in the sequence."""
    key_end: int
    position: int
    """Of the first new token."""
    first_new: int
    """Position of the sequence's first new token."""

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key_end - self.key_begin


@dataclass(frozen=True)
class Chunks:
    """Chunks whose keys are in the workspace together."""

    keys: KeyRanges
    work: torch.Tensor
    """int32 `[tiles, 8]`: first query token; number of query tokens; row of the workspace of the
    first key; position of the first query token; sequence; position of the sequence's first new
    token; 0; 0. Positions count from the first key. The tile with the most keys comes first."""

    @classmethod
    def of(cls, chunks: list[Chunk], tokens_per_tile: int, device: torch.device) -> "Chunks":
        """Kernel arguments for a list of chunks."""
        keys = [c.keys for c in chunks]
        rows = list(accumulate(keys, initial=0))[:-1]
        work = torch.cat(
            [_work(c, row, tokens_per_tile) for c, row in zip(chunks, rows, strict=True)]
        )
        # Tiles with the most keys take longest, so they start first.
        work = work[work[:, 3].argsort(descending=True, stable=True)]
        columns = [(c.sequence, c.key_begin, c.key_end) for c in chunks]
        # Rows aligned to 16 bytes: Triton compiles another variant for unaligned pointers.
        numbers = torch.zeros((4, -(-len(chunks) // 4) * 4), dtype=torch.int32, device="cpu")
        numbers[:, : len(chunks)] = torch.tensor([*zip(*columns, strict=True), rows], device="cpu")
        # One transfer.
        on_device = torch.cat([numbers.flatten(), work.flatten()]).to(device)
        of_chunks, of_tiles = on_device.split([numbers.numel(), work.numel()])
        sequences, begins, ends, first_rows = of_chunks.view(4, -1)[:, : len(chunks)]
        first, last = chunks[0].sequence, chunks[-1].sequence
        in_a_row = [c.sequence for c in chunks] == list(range(first, last + 1))
        ranges = KeyRanges(
            slice(first, last + 1) if in_a_row else sequences,
            num_rows=sum(keys),
            max_keys=max(keys),
            begins=begins,
            ends=ends,
            rows=first_rows,
        )
        return cls(ranges, of_tiles.view(-1, 8))


def _work(chunk: Chunk, row: int, tokens_per_tile: int) -> torch.Tensor:
    """`Chunks.work` of a chunk whose keys begin at a row of the workspace."""
    begins = torch.arange(0, chunk.queries, tokens_per_tile, dtype=torch.int32, device="cpu")
    work = torch.zeros((len(begins), 8), dtype=torch.int32, device="cpu")
    work[:, 0] = begins + chunk.query_begin
    work[:, 1] = (chunk.queries - begins).clamp(max=tokens_per_tile)
    work[:, 2] = row
    work[:, 3] = begins + chunk.position - chunk.key_begin
    work[:, 4] = chunk.sequence
    work[:, 5] = chunk.first_new - chunk.key_begin
    return work


def make_chunks(
    sequences: Iterable[tuple[int, int, int, int]],
    window: int | None,
    max_keys: int,
    tokens_per_tile: int,
    device: torch.device,
    recent: int = 0,
) -> list[Chunks]:
    """Groups of chunks whose keys fit in the workspace together.

    Args:
        sequences: index, first row of the query, new tokens and length of each.
        window: as of `paged_attention`.
        max_keys: capacity of the workspace. Only sequences longer than `window` may be longer than
            this, and then `window <= max_keys / 2`.
        tokens_per_tile: query tokens that a program of the kernel takes.
        device: of the tensors.
        recent: keys of each sequence that are not unpacked, the last ones; 0 with a window.
    """
    groups: list[list[Chunk]] = []
    room = 0
    for chunk in _chunks(sequences, window, max_keys, recent):
        if not groups or chunk.keys > room or len(groups[-1]) == _MAX_CHUNKS:
            groups.append([])
            room = max_keys
        groups[-1].append(chunk)
        room -= chunk.keys
    return [Chunks.of(group, tokens_per_tile, device) for group in groups]


def _chunks(
    sequences: Iterable[tuple[int, int, int, int]], window: int | None, max_keys: int, recent: int
) -> Iterator[Chunk]:
    for sequence, row, new, length in sequences:
        if window is None or window >= length:
            first_new = length - new
            yield Chunk(sequence, row, new, 0, max(0, length - recent), first_new, first_new)
            continue
        max_queries = max_keys - window + 1
        for begin in range(0, new, max_queries):
            queries = min(max_queries, new - begin)
            position = length - new + begin
            first = max(0, position - window + 1)
            end = position + queries
            yield Chunk(sequence, row + begin, queries, first, end, position, length - new)


def run_chunks(inputs: AttentionInputs, chunks: Chunks, tiles: Tiles | None) -> None:
    """Write the chunks' rows of the output, and of the LSE if the inputs have one.

    Args:
        tiles: of the Triton kernel; None for the one of `sm90`.
    """
    # Here, because the imports need Triton.
    from halfbyte.attention.prefill.rows import run_rows
    from halfbyte.attention.prefill.unpack import unpack

    key, value = unpack(inputs, chunks.keys)
    if tiles is None:
        run_tiles(inputs, key, value, chunks.work)
    else:
        run_rows(inputs, key, value, chunks.work, tiles)
