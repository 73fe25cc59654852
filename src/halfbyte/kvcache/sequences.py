"""Block tables: which pages hold which tokens of which sequence.

Sequences grow, fork (copy-on-write pages), shrink, and swap out to host memory and back in. Every
operation that can run out of pages is atomic.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.kvcache.allocator import NULL_PAGE, OutOfPagesError, PageAllocator
from halfbyte.kvcache.plan import KVCachePlan
from halfbyte.kvcache.pool import PagedKVPool
from halfbyte.kvcache.recent import RecentTokens, kept_after_crop, missing_positions

SequenceId = Hashable


@dataclass
class _Sequence:
    length: int
    tables: "list[array[int]]"
    """Page numbers (int32) per group; NULL_PAGE where a page has died."""
    entry: int = 0
    """Entry in `RecentTokens`, if used."""
    kept_from: int = 0
    """First position that the entry's ring has, unless overwritten since."""


@dataclass(frozen=True)
class HostSequence:
    """A sequence that left the pool.

    Args:
        plan: of the pool that it left.
        length: tokens.
        live: per group, the positions in its table that held a page.
        table_lengths: per group, pages in its table.
        data: uint8 `[live pages of all groups, page_bytes]` on the CPU.
        recent: its last tokens in every layer that has them, and from which position on.
        identity: of the pool that it left, see `PagedKVPool`.
    """

    plan: KVCachePlan
    length: int
    live: tuple[tuple[int, ...], ...]
    table_lengths: tuple[int, ...]
    data: torch.Tensor
    recent: tuple[list[torch.Tensor], int] = ([], 0)
    identity: str | None = None


class SequenceTables:
    """Sequences over one pool.

    Args:
        pool: whose pages are handed out.
        can_grow: enlarge the pool (doubling it) where it would run out.
        recent: rings for the last tokens of every sequence; None for none.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        can_grow: bool = False,
        recent: RecentTokens | None = None,
    ) -> None:
        self.pool = pool
        self.recent = recent
        self.allocator = PageAllocator(pool.num_pages)
        self._can_grow = can_grow
        self._sequences: dict[SequenceId, _Sequence] = {}

    def __contains__(self, seq: SequenceId) -> bool:
        return seq in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def length(self, seq: SequenceId) -> int:
        """Tokens of a sequence."""
        return self._get(seq).length

    def table(self, seq: SequenceId, group: int = 0) -> list[int]:
        """Page numbers of a sequence in a group, in order of tokens."""
        return self._get(seq).tables[group].tolist()

    def block_table(self, seqs: Sequence[SequenceId], group: int) -> np.ndarray:
        """int32 `[sequences, max pages]`: page numbers of a group, padded with zeros."""
        tables = [self._get(seq).tables[group] for seq in seqs]
        rows = np.zeros((len(seqs), max(map(len, tables), default=0)), np.int32)
        for table, row in zip(tables, rows, strict=True):
            row[: len(table)] = np.frombuffer(table, dtype=np.int32)
        return rows

    def add(self, seq: SequenceId) -> None:
        """Start an empty sequence.

        Raises:
            ValueError: it exists.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq!r} already exists")
        self._add(seq, _Sequence(0, [array("i") for _ in self.pool.plan.groups]))

    def append(self, seq: SequenceId, count: int) -> None:
        """Allocate room for `count` more tokens, not shared with other sequences.

        A partly filled last page that another sequence shares is copied first.

        Raises:
            OutOfPagesError: not enough free pages; the sequence is unchanged.
        """
        if count < 0:
            raise ValueError(f"count: expected a number >= 0, got {count}")
        sequence = self._get(seq)
        missing = [self._missing(seq, group, count) for group in range(len(sequence.tables))]
        shared = {
            group: tail
            for group in range(len(sequence.tables))
            if (tail := self._shared_tail(seq, group, count)) is not None
        }
        if not shared and not any(missing):  # most tokens of decode steps
            sequence.length += count
            return
        pages = self._allocate(sum(missing) + len(shared))
        with self._released_on_error(pages):
            sources = [sequence.tables[group][tail] for group, tail in shared.items()]
            self.pool.copy_pages(sources, pages[: len(shared)])
        for group, tail in shared.items():
            table = sequence.tables[group]
            self.allocator.release([table[tail]])
            table[tail] = pages.pop(0)
        for table, number in zip(sequence.tables, missing, strict=True):
            table.extend(pages[:number])
            del pages[:number]
        sequence.length += count

    def release_dead_pages(self, seq: SequenceId, num_computed_tokens: int) -> None:
        """Free pages that no query from `num_computed_tokens` on can reach (sliding windows)."""
        sequence = self._get(seq)
        # No further than the sequence's end: its last page is still being filled.
        num_computed_tokens = min(num_computed_tokens, sequence.length)
        for group, table in zip(self.pool.plan.groups, sequence.tables, strict=True):
            # Backwards to the first page that was released before, so that a call costs only the
            # newly dead pages.
            for i in range(group.num_dead_pages(num_computed_tokens) - 1, -1, -1):
                if table[i] == NULL_PAGE:
                    break
                self.allocator.release([table[i]])
                table[i] = NULL_PAGE

    def fork(self, parent: SequenceId, child: SequenceId) -> None:
        """Start a sequence with the parent's tokens, sharing its pages."""
        source = self._get(parent)
        if child in self._sequences:
            raise ValueError(f"sequence {child!r} already exists")
        for table in source.tables:
            self.allocator.retain(table)
        tables = [table[:] for table in source.tables]
        copy = _Sequence(source.length, tables, kept_from=source.kept_from)
        self._add(child, copy)
        if self.recent is not None:
            self.recent.copy(source.entry, copy.entry)

    def crop(self, seq: SequenceId, length: int) -> None:
        """Remove the tokens from `length` on.

        Raises:
            ValueError: `length` is not between 0 and the sequence's, or its window reaches pages
                that were released as dead.
        """
        sequence = self._get(seq)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"length: expected 0 .. {sequence.length}, got {length}")
        groups = self.pool.plan.groups
        for group, table in zip(groups, sequence.tables, strict=True):
            keep = -(-length // group.block_size)
            first = group.num_dead_pages(length)
            if NULL_PAGE in table[first:keep]:
                raise ValueError(f"length: the window at {length} reaches pages already released")
        for group, table in zip(groups, sequence.tables, strict=True):
            keep = -(-length // group.block_size)
            self.allocator.release(table[keep:])
            del table[keep:]
        if self.recent is not None and length < sequence.length:
            sequence.kept_from = kept_after_crop(
                sequence.kept_from, sequence.length, length, self.recent.ring
            )
        sequence.length = length

    def free(self, seq: SequenceId) -> None:
        """End a sequence and release its pages."""
        sequence = self._get(seq)
        for table in sequence.tables:
            self.allocator.release(table)
        if self.recent is not None:
            self.recent.free(sequence.entry)
        del self._sequences[seq]

    def move_out(self, seq: SequenceId) -> HostSequence:
        """Swap a sequence out: copy its pages to host memory and release them."""
        sequence = self._get(seq)
        live = tuple(
            tuple(i for i, page in enumerate(table) if page != NULL_PAGE)
            for table in sequence.tables
        )
        pages = [table[i] for table, at in zip(sequence.tables, live, strict=True) for i in at]
        lengths = tuple(len(table) for table in sequence.tables)
        data = self.pool.read_pages(pages)
        recent = (self.recent.read(sequence.entry) if self.recent else [], sequence.kept_from)
        host = HostSequence(
            self.pool.plan, sequence.length, live, lengths, data, recent, self.pool.identity
        )
        self.free(seq)
        return host

    def move_in(self, seq: SequenceId, host: HostSequence) -> None:
        """Swap in a sequence from `move_out`, under any unused name.

        Its last tokens in 16 bits come along if the rings have the same size; else they are filled
        from the pages.

        Raises:
            OutOfPagesError: not enough free pages; nothing changes.
            ValueError: the name is taken, or the sequence left a pool of another plan, or one with
                other scales or another recipe: its pages would be read as other values.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq!r} already exists")
        if host.plan != self.pool.plan:
            raise ValueError("host: the sequence left a pool of another plan")
        if host.identity != self.pool.identity:
            raise ValueError("host: the sequence left a pool of other scales or another recipe")
        pages = self._allocate(host.data.shape[0])
        with self._released_on_error(pages):
            self.pool.write_pages(pages, host.data)
        tables, taken = [], 0
        for at, length in zip(host.live, host.table_lengths, strict=True):
            table = array("i", [NULL_PAGE]) * length
            for i in at:
                table[i] = pages[taken]
                taken += 1
            tables.append(table)
        kept, kept_from = host.recent
        if self.recent is None or not self.recent.fits(kept):
            kept = []  # filled from the pages
        sequence = _Sequence(host.length, tables, kept_from=kept_from if kept else host.length)
        self._add(seq, sequence)
        if self.recent is not None and kept:
            self.recent.write(sequence.entry, kept)

    def entry(self, seq: SequenceId) -> int:
        """Entry of a sequence in `recent`."""
        return self._get(seq).entry

    def missing_recent(self, seq: SequenceId, length: int) -> range:
        """Positions that attention after `length` tokens reads but the ring does not have."""
        if self.recent is None:
            return range(0)
        return missing_positions(self._get(seq).kept_from, length, self.recent.tokens)

    def fill_recent(self, seq: SequenceId, first: int) -> None:
        """Record that the rings of all layers have positions from `first` on again."""
        self._get(seq).kept_from = first

    def slots(self, seq: SequenceId, start: int, stop: int, group: int = 0) -> torch.Tensor:
        """Slots (int64, on the CPU) of the tokens `start` .. `stop - 1` of a sequence."""
        if not 0 <= start <= stop <= self.length(seq):
            raise ValueError(f"slots: {start} .. {stop} is not within {self.length(seq)} tokens")
        block_size = self.pool.plan.groups[group].block_size
        positions = torch.arange(start, stop, device="cpu")
        first = start // block_size
        pages = self._get(seq).tables[group][first : -(-stop // block_size)]
        table = torch.tensor(pages, dtype=torch.int64, device="cpu")
        return table[positions // block_size - first] * block_size + positions % block_size

    def pages_of_groups(self) -> list[list[int]]:
        """Per group, the pages that its sequences hold, for `PagedKVPool.shard`."""
        pages: list[set[int]] = [set() for _ in self.pool.plan.groups]
        for sequence in self._sequences.values():
            for held, table in zip(pages, sequence.tables, strict=True):
                held.update(table)
        return [sorted(held - {NULL_PAGE}) for held in pages]

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables and allocator agree about every page."""
        self.allocator.check_integrity()
        holders = [0] * self.allocator.num_pages
        for seq, sequence in self._sequences.items():
            for group, table in zip(self.pool.plan.groups, sequence.tables, strict=True):
                expected = -(-sequence.length // group.block_size)
                assert len(table) == expected, f"{seq!r}: {len(table)} pages, not {expected}"
                for page in table:
                    holders[page] += page != NULL_PAGE
        for page, count in enumerate(holders):
            actual = self.allocator.num_holders(page)
            assert actual == count, f"page {page}: {actual} holders counted, {count} in tables"

    def _add(self, seq: SequenceId, sequence: _Sequence) -> None:
        if self.recent is not None:
            sequence.entry = self.recent.allocate()
        self._sequences[seq] = sequence

    def _get(self, seq: SequenceId) -> _Sequence:
        if seq not in self._sequences:
            raise ValueError(f"sequence {seq!r} does not exist")
        return self._sequences[seq]

    def _missing(self, seq: SequenceId, group: int, count: int) -> int:
        sequence = self._get(seq)
        block_size = self.pool.plan.groups[group].block_size
        return -(-(sequence.length + count) // block_size) - len(sequence.tables[group])

    def _shared_tail(self, seq: SequenceId, group: int, count: int) -> int | None:
        """Position in the table of a partly filled page that must be copied before writing."""
        sequence = self._get(seq)
        tail, used = divmod(sequence.length, self.pool.plan.groups[group].block_size)
        if not count or not used:
            return None
        page = sequence.tables[group][tail]
        return tail if self.allocator.num_holders(page) > 1 else None

    @contextmanager
    def _released_on_error(self, pages: Sequence[int]) -> Iterator[None]:
        """Release newly allocated pages if filling them fails."""
        try:
            yield
        except BaseException:
            self.allocator.release(pages)
            raise

    def _allocate(self, count: int) -> list[int]:
        if self._can_grow and count > self.allocator.num_free:
            needed = self.allocator.num_used + count + 1
            self.pool.grow(max(2 * self.pool.num_pages, needed))
            self.allocator.grow(self.pool.num_pages)
        return self.allocator.allocate(count)


__all__ = ["HostSequence", "OutOfPagesError", "SequenceTables"]
