"""A step's reads and writes of the rings, as tensors that a CUDA graph can read in every replay."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.attention.queries import QueryPositions
from halfbyte.kvcache.recent import PADDING_ENTRY
from halfbyte.kvcache.recent_slots import TokenSlots
from halfbyte.kvcache.recent_step import (
    MissingTokens,
    RecentStep,
    copy_to_device,
    last_rows,
    may_write_first,
    to_device,
)
from halfbyte.plugins.vllm.ring_entries import ScheduledRings


@dataclass(frozen=True)
class RingStep:
    """A step's rings, before slots are computed from the positions of its tokens.

    Args:
        ring: slots of a ring.
        entries: int32 `[sequences]`, part of a buffer that stays; `PADDING_ENTRY` for padding.
        rows: int64 `[n]`, the step's tokens that stay in the rings after it; None for all.
        missing: of the sequences whose rings lack tokens.
        write_first: as of `RecentStep`.
    """

    ring: int
    entries: torch.Tensor
    rows: torch.Tensor | None = None
    missing: Sequence[MissingTokens] = ()
    write_first: bool = True

    def recent_step(self, queries: QueryPositions) -> RecentStep:
        """With the slot of each token, computed on the device.

        The device has the right positions even if the host does not know yet how many draft tokens
        of the previous step were accepted.

        Args:
            queries: of the step's tokens.
        """
        slots = TokenSlots.of(*queries, self.entries, self.ring, self.rows)
        return RecentStep(
            self.entries,
            *slots,
            num_tokens=len(queries.positions),
            missing=self.missing,
            write_first=self.write_first,
        )


class RingBuffers:
    """Keeps the entries of a step where captured CUDA graphs read them.

    Args:
        capacity: max sequences of a step, padding included.
        tokens: R.
        ring: slots of a ring.
        device: of the rings.
    """

    def __init__(self, capacity: int, tokens: int, ring: int, device: torch.device) -> None:
        self.tokens = tokens
        self.ring = ring
        self._entries = torch.full((capacity,), PADDING_ENTRY, dtype=torch.int32, device=device)

    def step(self, rings: ScheduledRings | None, num_requests: int, num_tokens: int) -> RingStep:
        """The step's rings; does not sync.

        Args:
            rings: None in a dummy run, whose tokens belong to no request.
            num_requests, num_tokens: of the step's metadata, padding included.

        Raises:
            RuntimeError: the scheduler's step is larger (a bug in the plug-in).
        """
        entries = self._entries[:num_requests]
        if rings is None:
            entries.fill_(PADDING_ENTRY)
            return RingStep(self.ring, entries)
        count = len(rings.entries)
        if count > num_requests or rings.num_tokens > num_tokens:
            raise RuntimeError(
                f"halfbyte: expected a step of {num_requests} requests and {num_tokens} tokens, "
                f"the scheduler's has {count} and {rings.num_tokens}"
            )
        padded = np.full(num_requests, PADDING_ENTRY, np.int32)
        padded[:count] = rings.entries
        copy_to_device(padded, entries)
        rows = None
        if rings.counts.max(initial=0) > self.ring:
            rows = to_device(last_rows(rings.counts, self.ring), entries.device)
        write_first = may_write_first(rings.starts, rings.counts, self.tokens, self.ring)
        return RingStep(self.ring, entries, rows, rings.missing, write_first)
