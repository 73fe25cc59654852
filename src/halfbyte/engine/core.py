"""One engine step: schedule, run, sample. Works on token ids only; text is handled outside.

On a GPU the next step is launched before the host has read the tokens of this one, if it does not
depend on them (no prompt waits, no penalties): they stay on the GPU as its input. So the GPU
computes while the host turns tokens into text and schedules. A request that ends with a stop token
or string runs one step too many, whose token is dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.engine.interrupts import interrupts_deferred
from halfbyte.engine.logits import to_device
from halfbyte.engine.request import FinishReason, Request
from halfbyte.engine.runner import ModelRunner
from halfbyte.engine.sampler import PendingTokens, Sampler
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.engine.scheduler import ScheduledChunk, Scheduler
from halfbyte.kvcache import PagedKVPool, SequenceTables
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.models import KVQuantization


@dataclass(frozen=True)
class _Step:
    """A step that has been launched.

    Args:
        chunks: its tokens.
        requests: those that sample.
        sampled: their next tokens.
    """

    chunks: Sequence[ScheduledChunk]
    requests: Sequence[Request]
    sampled: PendingTokens

    @property
    def is_stale(self) -> bool:
        """Whether all its requests have ended since."""
        return all(chunk.request.is_finished for chunk in self.chunks)


class EngineCore:
    """Requests in, tokens out.

    Args:
        model: a transformers model of a supported architecture.
        pool: for its K and V.
        quantization: of each layer's K and V.
        max_model_len: context in tokens.
        max_batched_tokens: tokens per step.
        max_num_seqs: requests that run at once.
        attention_backend: name of an attention backend, or None to choose.
        batch_invariant: require results that are bitwise independent of the batch.
        cuda_graphs: run decode steps on a GPU as CUDA graphs.
        torch_compile: compile the layers of these graphs, unless `batch_invariant`.
        recent: rings for the last tokens of the sequences; None for none.
        eos_ids: ids that end a sequence, besides the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: PagedKVPool,
        quantization: KVQuantization,
        *,
        max_model_len: int,
        max_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        attention_backend: str | None = None,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        torch_compile: bool = False,
        recent: RecentTokens | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.tables = SequenceTables(pool, recent=recent)
        self.scheduler = Scheduler(self.tables, max_batched_tokens, max_num_seqs)
        self.runner = ModelRunner(
            model,
            self.tables,
            quantization,
            attention_backend,
            batch_invariant,
            (max_num_seqs, max_model_len) if cuda_graphs else None,
            torch_compile,
        )
        self.sampler = Sampler()
        self.looks_ahead = self.runner.graphs is not None
        """Whether the next step is launched before the tokens of a step are read. Only with CUDA
        graphs: they are launched without waiting for the device."""
        self._ahead: _Step | None = None
        self.max_model_len = max_model_len
        self._vocab_size = model.config.vocab_size
        self._eos_ids = eos_token_ids(model) | frozenset(eos_ids)
        self._next_id = 0

    def request(
        self, prompt: Iterable[int], params: SamplingParams, completion: int = 0
    ) -> Request:
        """Check a prompt and return a request for it; `add` queues it.

        Args:
            prompt: token ids.
            params: how to sample and when to stop.
            completion: which of the prompt's `params.n`.

        Raises:
            ValueError: the prompt is empty, fills the whole context, or has ids out of range.
        """
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ValueError("prompt: is empty")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"prompt: {len(tokens)} tokens leave no room to generate in a context of "
                f"{self.max_model_len}"
            )
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(
                f"prompt: token ids {min(tokens)} .. {max(tokens)} are not all in "
                f"0 .. {self._vocab_size - 1}"
            )
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._eos_ids
        )
        room = self.max_model_len - len(tokens)
        request = Request(
            self._next_id,
            tokens,
            params,
            seed=randbits(63) if params.seed is None else params.seed + completion,
            stop_ids=frozenset(i for i in stop_ids if 0 <= i < self._vocab_size),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        self._next_id += 1
        return request

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def step(self) -> list[tuple[Request, int]]:
        """Run one step and return the tokens it produced; finished requests are marked as such.

        A step is atomic: if anything in it raises, requests and block tables are restored to their
        state before the step, and the next step starts from there.
        """
        try:
            step, self._ahead = self._ahead, None
            step = step or self._launch()
            if step is None:
                return []
            ahead = self._launch_ahead(step) if self.looks_ahead else None
            sampled = step.sampled.read()
            produced: list[tuple[Request, int]] = []
            with interrupts_deferred():
                for request, choice in zip(step.requests, sampled, strict=True):
                    if request.is_finished:  # while this step was computed
                        continue
                    if choice.error is not None:  # the other requests continue
                        request.finish(FinishReason.ERROR, choice.error)
                    else:
                        request.append(choice.token, choice.logprobs)
                        produced.append((request, choice.token))
                self.scheduler.complete(step.chunks)
                self._ahead = ahead  # not before, as a second Ctrl-C may come before the rollback
                self._drop_stale()
        except BaseException:
            with interrupts_deferred():
                self._ahead = None
                self.scheduler.rollback()
            raise
        return produced

    def _launch(self) -> _Step | None:
        """Launch the next step; None if no work is left."""
        with interrupts_deferred():
            chunks = self.scheduler.schedule()
        if not chunks:
            return None
        logits = self.runner.run(
            [(c.request.id, c.request.tokens(c.start, c.start + c.count)) for c in chunks]
        )
        rows = [i for i, chunk in enumerate(chunks) if chunk.completes]
        requests = [chunks[i].request for i in rows]
        logits = _select(logits, rows)
        return _Step(chunks, requests, self.sampler.launch(requests, logits))

    def _launch_ahead(self, step: _Step) -> _Step | None:
        """Launch the step after `step`, whose tokens the host has not read; None if it needs
        them."""
        if any(request.params.has_penalties for request in step.requests):
            return None
        with interrupts_deferred():
            chunks = self.scheduler.schedule_ahead(step.chunks)
        if not chunks:
            return None
        requests = [chunk.request for chunk in chunks]
        going_on = set(requests)
        rows = [i for i, request in enumerate(step.requests) if request in going_on]
        tokens = _select(step.sampled.tokens, rows)
        logits = self.runner.run([(request.id, [0]) for request in requests], tokens=tokens)
        return _Step(chunks, requests, self.sampler.launch(requests, logits, num_unread=1))

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, tables and pages agree. Call between steps."""
        self.scheduler.check_integrity()

    def abort(self, request: Request, reason: FinishReason) -> None:
        """Finish a request now and free its pages. No effect on a finished request."""
        with interrupts_deferred():
            if not request.is_finished:
                request.finish(reason)
            self.scheduler.remove(request)
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Forget a step that was launched ahead, if all its requests have ended since."""
        if self._ahead is not None and self._ahead.is_stale:
            self._ahead = None
            self.scheduler.rollback()


def _select(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == len(values):
        return values
    return values[to_device(rows, torch.int64, values.device)]


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids from a model's generation config, or else from its config."""
    for config in (model.generation_config, model.config):
        ids: Any = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
