"""A step's use of the rings of `recent`: slots of its tokens, and positions to refill."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.store import read_tokens
from halfbyte.kvcache.store.base import Scale
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import PageLayout

_FILLED_AT_ONCE = 4096
"""Positions decoded at once; that takes about 100 MB for 8 KV heads of 128."""


class MissingTokens(NamedTuple):
    """Positions of a sequence that queries read from its ring but that it does not have.

    Args:
        number: of the sequence in the batch.
        entry: of its ring.
        positions: that must be filled from the pages.
        query: position of the step's first token.
    """

    number: int
    entry: int
    positions: range
    query: int


class LayerPages(NamedTuple):
    """A layer's pages with the step's block tables and all that decodes them.

    Args:
        pages: uint8 `[num_pages, page_stride]`.
        layout, k_scale, v_scale, transform: as for `halfbyte.kvcache.reshape_and_cache`.
        block_tables: int32 `[sequences, max_pages]`.
    """

    pages: torch.Tensor
    layout: PageLayout
    block_tables: torch.Tensor
    k_scale: Scale
    v_scale: Scale
    transform: KVTransform | None

    def read(
        self, sequences: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[n, kv_heads, D]` and V `[n, kv_heads, Dv]` of tokens, decoded.

        Args:
            sequences, positions: int64 `[n]`, of the tokens.
        """
        size = self.layout.block_size
        blocks = self.block_tables[sequences, positions // size].long()
        return read_tokens(
            self.pages,
            blocks * size + positions % size,
            self.layout,
            self.k_scale,
            self.v_scale,
            transform=self.transform,
            positions=positions,
        )


class MissingRanges(NamedTuple):
    """Missing positions as one range per sequence that has any, on the device."""

    numbers: torch.Tensor
    """int64 `[n]`, of the sequences in the batch."""
    entries: torch.Tensor
    """int32 `[n]`, of their rings."""
    begins: torch.Tensor
    """int32 `[n]`, first positions."""
    ends: torch.Tensor
    """int32 `[n]`, positions after the last ones."""
    max_tokens: int
    """Length of the longest range."""


class _Places(NamedTuple):
    """Missing positions of all sequences: int64 `[n]` on the device."""

    numbers: torch.Tensor
    entries: torch.Tensor
    positions: torch.Tensor


@dataclass(eq=False)
class RecentStep:
    """A step's updates of the rings, the same in every layer; also caches what they share.

    Args:
        entries: int32 `[sequences]`, each sequence's entry.
        rows: int64 `[n]`, which of the step's tokens are written to the rings: a sequence's last
            ones, as many as an entry has slots.
        owners, slots: int64 `[n]` each, the entry and the slot that each of them is written to.
        missing: positions that rings lack, for the sequences that have any.
        num_tokens: the number of the step's tokens.
        write_first: whether the step's tokens may be written to the rings before attention, see
            `may_write_first`.
    """

    entries: torch.Tensor
    rows: torch.Tensor
    owners: torch.Tensor
    slots: torch.Tensor
    num_tokens: int
    missing: Sequence[MissingTokens] = ()
    write_first: bool = True
    _places: dict[int | None, list[_Places]] = field(default_factory=dict, init=False)
    """Places of missing positions, by the layer's window."""
    _ranges: dict[int | None, MissingRanges] = field(default_factory=dict, init=False)
    """The same as ranges."""

    @classmethod
    def of(
        cls,
        tokens: int,
        ring: int,
        entries: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        missing: Sequence[range],
        device: torch.device | str = "cpu",
    ) -> "RecentStep":
        """The step of some sequences.

        Args:
            tokens: R.
            ring: slots of an entry, at least R.
            entries: per sequence, its entry.
            lengths: per sequence, its tokens, the step's included.
            counts: per sequence, the step's tokens.
            missing: per sequence, positions that its ring lacks.
            device: for the tensors.
        """
        count, length = np.asarray(counts, np.int64), np.asarray(lengths, np.int64)
        kept = np.minimum(count, ring)
        rows = last_rows(count, ring)
        # Position minus row is the same for all tokens of a sequence.
        slots = (rows + np.repeat(length - count.cumsum(), kept)) % ring
        owners = np.repeat(np.asarray(entries, np.int64), kept)
        lacking = [
            MissingTokens(i, entry, positions, all_tokens - own)
            for i, (entry, positions, all_tokens, own) in enumerate(
                zip(entries, missing, lengths, counts, strict=True)
            )
            if positions
        ]
        parts = np.asarray(entries, np.int64), rows, owners, slots
        numbers = to_device(np.concatenate(parts), device)
        of_entries, of_rows, of_owners, of_slots = numbers.split([*map(len, parts)])
        return cls(
            entries=of_entries.int(),
            rows=of_rows,
            owners=of_owners,
            slots=of_slots,
            num_tokens=sum(counts),
            missing=lacking,
            write_first=may_write_first(length - count, count, tokens, ring),
        )

    def slots_in(self, rings: tuple[torch.Tensor, torch.Tensor]) -> RingSlots:
        """Where the step's tokens go in the rings of a layer."""
        return RingSlots(*rings, self.rows, self.owners, self.slots)

    def missing_ranges(self, window: int | None, device: torch.device) -> MissingRanges:
        """Ranges of missing positions, cached for all layers with the same window.

        Args:
            window: of the layer's attention; pages before it may have been reused.
            device: for the tensors.
        """
        if window not in self._ranges:
            found = [_missing_range(tokens, window) for tokens in self.missing]
            columns = [
                [tokens.number for tokens in self.missing],
                [tokens.entry for tokens in self.missing],
                [positions.start for positions in found],
                [positions.stop for positions in found],
            ]
            numbers, entries, begins, ends = to_device(np.asarray(columns, np.int32), device)
            longest = max(map(len, found), default=0)
            self._ranges[window] = MissingRanges(numbers.long(), entries, begins, ends, longest)
        return self._ranges[window]

    def fill(
        self,
        rings: tuple[torch.Tensor, torch.Tensor],
        packed: LayerPages,
        window: int | None = None,
    ) -> None:
        """Fill missing positions of a layer's rings with values decoded from the pages.

        Args:
            rings: K and V, `[entries, kv_heads, ring, D]` and `[entries, kv_heads, ring, Dv]`.
            packed: of the layer, with all tokens before the step's.
            window: of the layer's attention; pages before it may have been reused.
        """
        if not self.missing:
            return
        if window not in self._places:
            self._places[window] = _missing_places(self.missing, window, packed.pages.device)
        for numbers, entries, positions in self._places[window]:
            for ring, x in zip(rings, packed.read(numbers, positions), strict=True):
                ring[entries, :, positions % ring.shape[2]] = x.to(ring.dtype)


def _missing_range(missing: MissingTokens, window: int | None) -> range:
    """The positions of `missing` that a layer's queries see."""
    positions = missing.positions
    first = positions.start
    if window is not None:
        first = max(first, missing.query - window + 1)
    return range(first, max(first, positions.stop))


def may_write_first(starts: np.ndarray, counts: np.ndarray, tokens: int, ring: int) -> bool:
    """Whether no new token overwrites a ring's slot that the step's own queries read.

    Prompts without earlier tokens read nothing from their rings, nor does any query if R is 1.

    Args:
        starts: int64 `[sequences]`, tokens before the step's. True ones may be fewer, if drafts
            were rejected that the host still counts; the answer holds for these, too.
        counts: int64 `[sequences]`, the step's tokens of each.
        tokens: R.
        ring: slots of an entry.
    """
    first_read = np.maximum(starts - tokens + 1, 0)
    return bool(((starts == first_read) | (starts + counts - first_read <= ring)).all())


def last_rows(counts: np.ndarray, ring: int) -> np.ndarray:
    """int64 `[n]`: rows of each sequence's last tokens of a step, at most `ring`.

    Args:
        counts: int64 `[sequences]`, the step's tokens of each.
        ring: slots of an entry.
    """
    kept = np.minimum(counts, ring)
    number = np.arange(kept.sum()) - np.repeat(kept.cumsum() - kept, kept)
    rows: np.ndarray = np.repeat(counts.cumsum() - kept, kept) + number
    return rows


def _missing_places(
    missing: Sequence[MissingTokens], window: int | None, device: torch.device
) -> list[_Places]:
    """Places of all missing positions that a layer's queries see, `_FILLED_AT_ONCE` at a time."""
    parts = []
    for tokens in missing:
        positions = _missing_range(tokens, window)
        seen = np.arange(positions.start, positions.stop)
        of_all = np.full_like(seen, tokens.number), np.full_like(seen, tokens.entry)
        parts.append(np.stack([*of_all, seen]))
    places = to_device(np.concatenate(parts, axis=1), device)
    return [_Places(*some) for some in places.split(_FILLED_AT_ONCE, dim=1) if some.shape[1]]


def to_device(numbers: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy to the device in one transfer, without a sync."""
    return _pinned_for(numbers, device).to(device, non_blocking=True)


def copy_to_device(numbers: np.ndarray, out: torch.Tensor) -> None:
    """`to_device` into a tensor of the same dtype and shape.

    Args:
        out: written.
    """
    out.copy_(_pinned_for(numbers, out.device), non_blocking=True)


def _pinned_for(numbers: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """On the host, pinned where transfers to the device need it."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
