"""Decode steps as CUDA graphs: one launch instead of hundreds, for any sequence lengths.

A graph is captured for one batch size and replayed for batches up to that size. Its inputs are
static buffers; padding sequences are empty and have no slots. The attention's plan is computed
inside the graph, so that it follows the lengths of each replay.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from halfbyte.engine.compiled import CompiledLayers
from halfbyte.kvcache import OutOfPagesError, SequenceTables
from halfbyte.kvcache.recent_step import RecentStep
from halfbyte.linear.invariant.products import InvariantProducts
from halfbyte.models import BATCH_ARGUMENT, KVQuantization, PagedBatch
from halfbyte.models.batch import RecentBatch

_LOGGER = logging.getLogger(__name__)
_WARM_UPS = 2


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Runs steps of one token per sequence.

    Args:
        model: must have the engine's attention attached during `run`.
        tables: sequences over a pool on a GPU.
        quantization: of each layer's K and V, with tensors on the GPU.
        max_num_seqs: max sequences per step.
        max_model_len: max tokens per sequence.
        attention_backend, batch_invariant, torch_compile: as for `ModelRunner`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tables: SequenceTables,
        quantization: KVQuantization,
        max_num_seqs: int,
        max_model_len: int,
        attention_backend: str | None = None,
        batch_invariant: bool = False,
        torch_compile: bool = False,
    ) -> None:
        self.model = model
        self.tables = tables
        self.quantization = quantization
        self.attention_backend = attention_backend
        self.batch_invariant = batch_invariant
        # Compiled layers round differently from those of prefill.
        compiles = torch_compile and not batch_invariant
        self.compiled = CompiledLayers(model) if compiles else None
        self.sizes = graph_sizes(max_num_seqs)
        device, groups = tables.pool.device, tables.pool.plan.groups
        max_size = self.sizes[-1]
        # One transfer per dtype. Rows: token ids, positions, slots of each group.
        self._int64 = torch.zeros((2 + len(groups), max_size), dtype=torch.int64, device=device)
        self._input_ids, self._positions, *self._slots = self._int64.split(1)
        # Rows: lengths, entries of the rings.
        self._int32 = torch.zeros((2, max_size), dtype=torch.int32, device=device)
        self._seq_lens, self._entries = self._int32
        self._starts = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        # Tables keep entries of pages before a sliding window, so they may exceed the pool's size.
        widths = [-(-max_model_len // group.block_size) for group in groups]
        self._block_tables = [
            torch.zeros((max_size, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._rows = torch.arange(max_size, device=device)
        self._rings = 0
        self._graphs: dict[int, _Graph] = {}
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
        self._failure: str | None = None

    def can_run(self, chunks: Sequence[tuple[object, Sequence[int]]]) -> bool:
        """Whether a step can run as a graph."""
        return (
            self._failure is None
            and len(chunks) <= self.sizes[-1]
            and all(len(ids) == 1 for _, ids in chunks)
            and not any(
                self.tables.missing_recent(seq, self.tables.length(seq) - 1) for seq, _ in chunks
            )
        )

    @property
    def num_captures(self) -> int:
        """Calls of `capture_all`'s `progress`: graphs, and the compilation."""
        return len(self.sizes) + (self.compiled is not None)

    def capture_all(self, progress: Callable[[], None]) -> None:
        """Compile and capture all sizes now, so that no request waits for that.

        Args:
            progress: called after the compilation and after each capture.
        """
        chunks = [(object(), [0])]  # a dummy sequence of one token, freed below
        seq = chunks[0][0]
        self.tables.add(seq)
        try:
            with suppress(OutOfPagesError), torch.cuda.device(self._seq_lens.device):
                self.tables.append(seq, 1)
                if self.compiled is not None:
                    self._compile(chunks)
                    progress()
                # Largest first: smaller graphs reuse its memory.
                for size in reversed(list(self.sizes)):
                    if size in self.sizes:
                        self._fill(chunks)
                        self._graph(size)
                    progress()
        finally:
            self.tables.free(seq)

    def _compile(self, chunks: Sequence[tuple[object, Sequence[int]]]) -> None:
        """Compile for all sizes: a size of 1 needs another compilation than larger ones."""
        for size in {self.sizes[-1], self.sizes[0]}:
            with suppress(torch.OutOfMemoryError):  # `_graph` reports it
                self._fill(chunks)
                self._try_compiled(size)

    def run(
        self, chunks: Sequence[tuple[object, Sequence[int]]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Logits `[sequences, vocabulary]`, valid until the next run; None if capturing failed.

        Does not wait for the GPU, unless it captures.

        Args:
            chunks: `(sequence, [token id])`; the slots are already allocated.
            tokens: int64 `[sequences]` on the GPU, instead of these ids.
        """
        with torch.cuda.device(self._seq_lens.device):
            return self._run(chunks, tokens)

    def _run(
        self, chunks: Sequence[tuple[object, Sequence[int]]], tokens: torch.Tensor | None
    ) -> torch.Tensor | None:
        size = next(size for size in self.sizes if size >= len(chunks))
        self._fill(chunks)
        if tokens is not None:
            self._input_ids[0, : len(chunks)].copy_(tokens)
        graph = self._graph(size)
        if graph is None:
            return None
        graph.graph.replay()
        return graph.logits[: len(chunks)]

    def _graph(self, size: int) -> _Graph | None:
        """The graph of a size, captured on first use; None if capturing failed."""
        if self._failure is not None:
            return None
        if self.tables.recent is not None and self._rings != self.tables.recent.count:
            self._graphs.clear()  # the rings were reallocated
            self._rings = self.tables.recent.count
        if size not in self._graphs:
            stream = torch.cuda.current_stream()
            try:
                self._graphs[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                # Batches of this size use a larger graph, if there is one.
                kept = [other for other in self.sizes if other in self._graphs or other < size]
                self.sizes = kept or [0]
                _LOGGER.warning("no CUDA graph for %d sequences: %s", size, error)
                return None
            except Exception as error:
                # Models whose code syncs with the GPU cannot be captured; they run without graphs.
                self._failure = f"{type(error).__name__}: {error}"
                _LOGGER.warning("decoding without CUDA graphs: %s", self._failure)
                torch.cuda.synchronize()
                _end_failed_capture(stream)
                return None
        return self._graphs[size]

    def _fill(self, chunks: Sequence[tuple[object, Sequence[int]]]) -> None:
        count = len(chunks)
        int64 = np.zeros(self._int64.shape, np.int64)
        int32 = np.zeros(self._int32.shape, np.int32)
        ids, positions, *all_slots = int64
        seq_lens, entries = int32
        ids[:count] = [ids[0] for _, ids in chunks]
        seq_lens[:count] = [self.tables.length(seq) for seq, _ in chunks]
        positions[:count] = last = seq_lens[:count] - 1
        if self.tables.recent is not None:
            entries[:count] = [self.tables.entry(seq) for seq, _ in chunks]
        for group, (buffer, slots) in enumerate(zip(self._block_tables, all_slots, strict=True)):
            block_size = self.tables.pool.plan.groups[group].block_size
            table = self.tables.block_table([seq for seq, _ in chunks], group)
            slots[count:] = -1  # of padding
            slots[:count] = table[np.arange(count), last // block_size] * np.int64(block_size)
            slots[:count] += last % block_size
            _copy(buffer[:count, : table.shape[1]], table)
        _copy(self._int64, int64)
        _copy(self._int32, int32)

    def _batch(self, size: int) -> PagedBatch:
        recent, positions = self.tables.recent, self._positions[0, :size]
        of_recent = None
        if recent is not None:
            entries = self._entries[:size]
            places = self._rows[:size], entries.long(), positions % recent.ring
            of_recent = RecentBatch(self.tables, RecentStep(entries, *places, size))
        return PagedBatch(
            pool=self.tables.pool,
            quantization=self.quantization,
            query_start_loc=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=[table[:size] for table in self._block_tables],
            slot_mapping=[slots[0, :size] for slots in self._slots],
            positions=positions,
            recent=of_recent,
            backend=self.attention_backend,
            batch_invariant=self.batch_invariant,
        )

    def _try_compiled(self, size: int) -> None:
        """Run once with compiled layers, if they are used; they are not after an error."""
        if self.compiled is None:
            return
        try:
            self._forward(size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            _LOGGER.warning("decoding without torch.compile: %s: %s", type(error).__name__, reason)
            self.compiled = None

    def _forward(self, size: int) -> torch.Tensor:
        batch = self._batch(size)
        products = InvariantProducts() if self.batch_invariant else nullcontext()
        with products, self.compiled.in_use() if self.compiled else nullcontext():
            output = self.model(
                input_ids=self._input_ids[:, :size],
                position_ids=self._positions[:, :size],
                use_cache=False,
                **{BATCH_ARGUMENT: batch},
            )
        if len(batch.layers_run) != self.tables.pool.plan.num_layers:
            raise RuntimeError("the cache did not reach every attention layer")
        logits: torch.Tensor = output.logits[0]
        return logits

    def _capture(self, size: int) -> _Graph:
        # Capture needs a side stream. The warm-up runs write the same values as the replay.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._try_compiled(size)
            for _ in range(_WARM_UPS):
                self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._forward(size)
        return _Graph(graph, logits)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: powers of two up to 8, then multiples of 8, up to the maximum."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def _end_failed_capture(stream: torch.cuda.Stream) -> None:
    """Restore what a failed capture leaves changed in PyTorch: current stream and generator.

    Args:
        stream: the current one before the capture.

    The generator, unusable after a failed capture, gets a copy of its state. Graphs captured before
    keep the old state.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def _copy(target: torch.Tensor, values: np.ndarray) -> None:
    """Copy to the GPU without a sync."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
