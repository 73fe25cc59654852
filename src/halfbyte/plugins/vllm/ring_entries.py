"""Which request holds which ring, and the tokens that each ring has.

A request holds an entry from its first step until it finishes or is preempted. Tokens missing from
its ring after a prefix-cache hit or a resume are filled in from its pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from halfbyte.kvcache.recent import PADDING_ENTRY, kept_after_crop, missing_positions
from halfbyte.kvcache.recent_step import MissingTokens


@dataclass
class _Held:
    entry: int
    length: int
    """Tokens computed after the step."""
    kept_from: int
    """The entry holds positions from here on, up to the ring's capacity."""


class ScheduledRings(NamedTuple):
    """A step's requests and their rings, in the order of the step's rows.

    Args:
        entries: int32 `[requests]`.
        starts: int64 `[requests]`, tokens before the step's, as far as the host knows.
        counts: int64 `[requests]`, the step's tokens of each.
        missing: of the requests whose ring lacks tokens.
    """

    entries: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    missing: Sequence[MissingTokens]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.counts.sum())


class RingEntries:
    """Assignment of ring entries to requests, and the tokens each ring holds.

    Args:
        capacity: max running requests; entries are 1 to `capacity`, as `PADDING_ENTRY` is 0.
        tokens: R.
        ring: slots of a ring; all above R are slack for drafts that are rejected.
    """

    def __init__(self, capacity: int, tokens: int, ring: int) -> None:
        self.tokens = tokens
        self.ring = ring
        self._free = list(range(capacity, PADDING_ENTRY, -1))
        self._held: dict[str, _Held] = {}
        self._counts: dict[str, int] = {}
        self._missing: dict[str, range] = {}

    @property
    def lacks_tokens(self) -> bool:
        """Whether a ring of the step lacks tokens that its queries read."""
        return any(self._missing.values())

    def begin(self, scheduled: Any) -> None:
        """Update the entries for a step.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
        """
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            if request in self._held:
                self._free.append(self._held.pop(request).entry)
        self._missing, self._counts = {}, scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            self._continue(new.req_id, new.num_computed_tokens, is_new=True)
        cached = scheduled.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._continue(request, computed, is_new=request in cached.resumed_req_ids)

    def step(self, requests: Sequence[str]) -> ScheduledRings:
        """The step's rings.

        Args:
            requests: in the order of the step's rows.
        """
        held = [self._held[request] for request in requests]
        counts = [self._counts[request] for request in requests]
        starts = [x.length - count for x, count in zip(held, counts, strict=True)]
        lacking = [
            MissingTokens(i, x.entry, self._missing[request], start)
            for i, (request, x, start) in enumerate(zip(requests, held, starts, strict=True))
            if self._missing[request]
        ]
        return ScheduledRings(
            np.array([x.entry for x in held], np.int32),
            np.array(starts, np.int64),
            np.array(counts, np.int64),
            lacking,
        )

    def _continue(self, request: str, computed: int, is_new: bool) -> None:
        """Record that a request's next tokens follow `computed` ones."""
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = _Held(self._take(), computed, computed)
        elif is_new or computed > held.length:  # the ring may hold other tokens there
            held.kept_from = computed
        else:  # rolled back, or unchanged
            held.kept_from = kept_after_crop(held.kept_from, held.length, computed, self.ring)
        self._held[request] = self._held.pop(request)  # to the end: the longest idle come first
        missing = missing_positions(held.kept_from, computed, self.tokens)
        self._missing[request] = missing
        held.kept_from = min(held.kept_from, missing.start)
        held.length = computed + self._counts[request]

    def _take(self) -> int:
        if not self._free:  # evict a waiting request: resuming refills its ring from pages
            waiting = next(x for x in self._held if x not in self._counts)
            self._free.append(self._held.pop(waiting).entry)
        return self._free.pop()
