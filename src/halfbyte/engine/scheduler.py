"""Chooses which tokens of which requests run in the next step. Handles pages, no tensors.

First come, first served, in steps of at most `max_batched_tokens` tokens: decoding requests first
with one token each, then prompts in chunks, then new requests. When pages run out, the youngest
running request is preempted: its pages are freed, and its tokens are recomputed later. A request
that does not fit alone fails, and its pages are freed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.engine.request import FinishReason, Request
from halfbyte.kvcache import OutOfPagesError, SequenceTables


@dataclass(frozen=True)
class ScheduledChunk:
    """`count` tokens of a request from `start` on; their slots are allocated."""

    request: Request
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether this chunk completes the request's tokens, so that it can sample."""
        return self.start + self.count == self.request.num_tokens


class Scheduler:
    """Queues of waiting and running requests, and their block tables.

    Args:
        tables: keyed by request id.
        max_batched_tokens: tokens per step.
        max_num_seqs: requests that run at once.
    """

    def __init__(self, tables: SequenceTables, max_batched_tokens: int, max_num_seqs: int) -> None:
        if max_batched_tokens < 1 or max_num_seqs < 1:
            raise ValueError(
                "max_batched_tokens and max_num_seqs: expected at least 1, got "
                f"{max_batched_tokens} and {max_num_seqs}"
            )
        self.tables = tables
        self.max_batched_tokens = max_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._preempted = False
        self._is_open = False  # a step is scheduled, and neither completed nor rolled back
        self._ahead: list[ScheduledChunk] = []  # of `schedule_ahead`

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the next step's tokens and allocate their slots.

        Requests that can never fit are finished with an error. Empty only if no work is left.
        """
        if self._is_open:  # a second Ctrl-C came before `rollback`
            self.rollback()
        self._is_open = True
        chunks: list[ScheduledChunk] = []
        self._preempted = False
        budget = self.max_batched_tokens
        for request in list(self.running):
            if budget == 0:
                break
            # Preempted by an older request in this step.
            if self._preempted and request not in self.running:
                continue
            chunk = self._place(request, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.count
        # A step that preempted a request has no pages for new ones.
        full = bool(chunks) and self._preempted
        while budget and self.waiting and len(self.running) < self.max_num_seqs and not full:
            request = self.waiting[0]
            self.tables.add(request.id)
            try:
                chunk = self._allocate(request, budget)
            except OutOfPagesError as error:
                self.tables.free(request.id)
                if self.running:
                    break  # wait for their pages
                self._fail(self.waiting.popleft(), error)
                continue
            self.running.append(self.waiting.popleft())
            chunks.append(chunk)
            budget -= chunk.count
        self._is_open = bool(chunks)
        if not chunks and self.has_work:
            return self.schedule()  # every candidate failed; the next ones may fit
        return chunks

    def schedule_ahead(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Choose the tokens of the next step before this one's are known.

        One token for every request that this step does not finish by length. A request that
        finishes by a stop token or string runs one step too many; that slot is freed with its
        others.

        Args:
            chunks: of this step.

        Returns:
            Empty if the next step may have other work: chunks of prompts, new requests, preemption.
        """
        self._ahead = []
        alive = [chunk for chunk in chunks if not chunk.request.is_finished]
        if len(alive) < len(self.running) or not all(chunk.completes for chunk in alive):
            return []
        going_on = [c for c in alive if len(c.request.output) + 1 < c.request.max_tokens]
        if self.waiting and len(going_on) < self.max_num_seqs:
            return []
        ahead = [ScheduledChunk(c.request, c.start + c.count, 1) for c in going_on]
        for chunk in ahead:
            try:
                self.tables.append(chunk.request.id, 1)
            except OutOfPagesError:  # the next step will preempt
                for placed in ahead[: ahead.index(chunk)]:
                    self.tables.crop(placed.request.id, placed.start)
                return []
        self._ahead = ahead
        return ahead

    def complete(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Mark chunks as computed; free pages of finished requests and outside sliding windows.

        Requests that have ended since the step was scheduled are left as they are.
        """
        for chunk in chunks:
            request = chunk.request
            if request.id not in self.tables:
                continue
            request.num_computed = chunk.start + chunk.count
            if request.is_finished:
                self.remove(request)
            else:
                self.tables.release_dead_pages(request.id, request.num_computed)
        if self._ahead is chunks:
            self._ahead = []
        self._is_open = bool(self._ahead)

    def rollback(self) -> None:
        """Undo `schedule` after a failed step: free slots whose tokens were not computed.

        Works from the state of requests and tables, not from the chunks, so it also undoes a
        `schedule` that failed midway. Preempted requests stay preempted. If the step
        may have overwritten some of a request's last tokens in its ring, the request is preempted
        and recomputed, because the pages hold them in four bits only.
        """
        for request in list(reversed(self.running)):
            if request.is_finished:  # the step failed after its last token
                self.remove(request)
            elif self.tables.length(request.id) > request.num_computed:
                self.tables.crop(request.id, request.num_computed)
                if self.tables.missing_recent(request.id, request.num_computed):
                    self._preempt(request)
        for request in self.waiting:
            if request.id in self.tables:
                self.tables.free(request.id)
        self._is_open, self._ahead = False, []

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tables hold exactly the computed tokens, and those of a
        step that was scheduled ahead.

        Valid between steps only: during a step the tables also have slots for its tokens.
        """
        self.tables.check_integrity()
        running = {request.id for request in self.running}
        assert len(running) == len(self.running), "a request runs twice"
        waiting = {request.id for request in self.waiting}
        assert len(waiting) == len(self.waiting), "a request waits twice"
        assert not running & waiting, f"requests {running & waiting} both run and wait"
        assert len(self.tables) == len(running), "the tables hold sequences of no running request"
        ahead = {chunk.request.id: chunk.count for chunk in self._ahead}
        for request in self.running:
            assert request.id in self.tables, f"request {request.id} runs and has no sequence"
            length = self.tables.length(request.id)
            assert length == request.num_computed + ahead.get(request.id, 0), (
                f"request {request.id}: slots for {length} tokens, {request.num_computed} computed"
            )

    def remove(self, request: Request) -> None:
        """Remove a request from its queue and free its pages."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            self.tables.free(request.id)

    def _place(self, request: Request, budget: int) -> ScheduledChunk | None:
        """Allocate for a running request, preempting younger requests not yet placed if needed."""
        while True:
            try:
                return self._allocate(request, budget)
            except OutOfPagesError as error:
                victim = self.running[-1]
                if victim is request:
                    if len(self.running) > 1:
                        self._preempt(request)
                    else:
                        self.remove(request)
                        self._fail(request, error)
                    return None
                self._preempt(victim)

    def _allocate(self, request: Request, budget: int) -> ScheduledChunk:
        start = request.num_computed
        count = min(budget, request.num_tokens - start)
        self.tables.append(request.id, count)
        return ScheduledChunk(request, start, count)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.tables.free(request.id)
        request.num_computed = 0
        self._preempted = True
        self.waiting.appendleft(request)

    @staticmethod
    def _fail(request: Request, error: OutOfPagesError) -> None:
        request.finish(
            FinishReason.ERROR,
            f"{error}, for {request.num_tokens:,} tokens of this request alone: give more "
            "num_pages (a larger gpu_memory_utilization), or a max_model_len that fits",
        )
