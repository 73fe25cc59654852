"""The loop's body: schedule, run, sample. Token ids only, so that a server can drive it, too."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.engine.interrupts import interrupts_deferred
from halfbyte.engine.request import FinishReason, Request
from halfbyte.engine.runner import ModelRunner
from halfbyte.engine.sampler import NoTokenError, Sampler, SavedGenerators
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache import PagedKVPool, SequenceTables
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.models import KVQuantization


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
        batch_invariant: ask for bitwise equal results whatever else is in the batch.
        cuda_graphs: run decode steps on a GPU as CUDA graphs.
        recent: rings for the last tokens of the sequences; None for none.
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
        recent: RecentTokens | None = None,
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
        )
        self.sampler = Sampler()
        self.max_model_len = max_model_len
        self._vocab_size = model.config.vocab_size
        self._eos_ids = eos_token_ids(model)
        self._next_id = 0

    def request(self, prompt: Iterable[int], params: SamplingParams) -> Request:
        """Check a prompt and make a request of it, which `add` queues.

        Raises:
            ValueError: it is empty, leaves no room in the context, or has ids out of range.
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
        request = Request(self._next_id, tokens, params)
        self._next_id += 1
        return request

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def step(self) -> list[tuple[Request, int]]:
        """Run one step; the tokens that it produced. Requests note by themselves when they end.

        A step happens whole or not at all: whatever is raised, and wherever, requests, block tables
        and random numbers are afterwards as they were before, and the next step starts from there.
        """
        generators: SavedGenerators = []
        try:
            with interrupts_deferred():
                chunks = self.scheduler.schedule()
            if not chunks:
                return []
            logits = self.runner.run(
                [(c.request.id, c.request.tokens(c.start, c.start + c.count)) for c in chunks]
            )
            rows = [
                (chunk.request, row)
                for chunk, row in zip(chunks, logits, strict=True)
                if chunk.completes
            ]
            generators = self.sampler.save([request for request, _ in rows])
            sampled = [(request, self._sample(request, row)) for request, row in rows]
            produced: list[tuple[Request, int]] = []
            with interrupts_deferred():
                for request, token in sampled:
                    if isinstance(token, NoTokenError):  # the others go on
                        request.finish(FinishReason.ERROR, str(token))
                    else:
                        self._append(request, token)
                        produced.append((request, token))
                    if request.is_finished:
                        self.sampler.forget(request)
                self.scheduler.complete(chunks)
                generators = []  # what is done stays
        except BaseException:
            with interrupts_deferred():
                self.scheduler.rollback()
                self.sampler.restore(generators)
            raise
        return produced

    def _sample(self, request: Request, logits: torch.Tensor) -> int | NoTokenError:
        try:
            return self.sampler.sample(request, logits)
        except NoTokenError as error:
            return error

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, block tables and pages agree, between two steps."""
        self.scheduler.check_integrity()

    def abort(self, request: Request, reason: FinishReason) -> None:
        """End a request now and free its pages; one that has ended stays as it was."""
        if not request.is_finished:
            request.finish(reason)
        self.scheduler.remove(request)
        self.sampler.forget(request)

    def _append(self, request: Request, token: int) -> None:
        request.output.append(token)
        params = request.params
        if token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos):
            request.finish(FinishReason.STOP)
        elif len(request.output) >= params.max_tokens or request.num_tokens >= self.max_model_len:
            request.finish(FinishReason.LENGTH)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids of a model's generation config, or else of its config."""
    for config in (model.generation_config, model.config):
        ids: Any = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
