"""Runs the model for one step: token ids in, logits out, K and V in the pool."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from halfbyte.engine.graphs import DecodeGraphs
from halfbyte.engine.interrupts import interrupts_deferred
from halfbyte.kvcache import SequenceTables
from halfbyte.linear.invariant.products import InvariantProducts
from halfbyte.models import BATCH_ARGUMENT, ENGINE, KVQuantization, PagedBatch, register


class ModelRunner:
    """Runs a model on a KV pool.

    Args:
        model: a transformers model of a supported architecture.
        tables: sequences of the pool that stores K and V.
        quantization: of each layer's K and V.
        attention_backend: name of an attention backend, or None to choose.
        batch_invariant: require results that are bitwise independent of the batch.
        graph_limits: max `(sequences, tokens per sequence)` of decode steps that run as CUDA
            graphs on a GPU; None for no graphs.
        torch_compile: compile the layers of the graphs, unless `batch_invariant`; see
            `CompiledLayers`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tables: SequenceTables,
        quantization: KVQuantization,
        attention_backend: str | None = None,
        batch_invariant: bool = False,
        graph_limits: tuple[int, int] | None = None,
        torch_compile: bool = False,
    ) -> None:
        self.model = model
        self.tables = tables
        self.quantization = quantization
        self.attention_backend = attention_backend
        self.batch_invariant = batch_invariant
        self.graphs: DecodeGraphs | None = None
        register()
        if tables.pool.device.type == "cuda" and graph_limits is not None:
            self.graphs = DecodeGraphs(
                model,
                tables,
                self.quantization,
                *graph_limits,
                attention_backend,
                batch_invariant,
                torch_compile,
            )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Set the engine's attention in the model, and restore the model's own on exit.

        `run` does so by itself; as a context around many runs this saves a walk over the modules
        in each.
        """
        before = self.model.config._attn_implementation
        if before == ENGINE:
            yield
            return
        try:
            with interrupts_deferred():
                self.model.set_attn_implementation(ENGINE)
            yield
        finally:
            with interrupts_deferred():
                self.model.set_attn_implementation(before)

    @torch.inference_mode()
    def capture_graphs(self, progress: Callable[[], None]) -> None:
        """Compile and capture the CUDA graphs, if enabled, before the first request.

        Args:
            progress: as of `DecodeGraphs.capture_all`.
        """
        if self.graphs is not None:
            with self.attached():
                self.graphs.capture_all(progress)

    @torch.inference_mode()
    def run(
        self,
        chunks: Sequence[tuple[object, Sequence[int]]],
        *,
        tokens: torch.Tensor | None = None,
        all_logits: bool = False,
    ) -> torch.Tensor:
        """Run the model on the last tokens of sequences; their slots must be allocated.

        Args:
            chunks: `(sequence, token ids)`: the sequence's last tokens.
            tokens: int64 `[sequences]` on the device, instead of the ids of chunks of one token.
            all_logits: return logits of every token instead of each sequence's last.

        Returns:
            Logits `[sequences or tokens, vocabulary]` in the model's dtype.

        Raises:
            RuntimeError: the model did not pass the cache to every layer's attention.
        """
        if self.graphs is not None and not all_logits and self.graphs.can_run(chunks):
            with self.attached():
                logits = self.graphs.run(chunks, tokens)
            if logits is not None:
                return logits
        device = self.tables.pool.device
        batch = PagedBatch.of(
            self.tables,
            self.quantization,
            [(seq, len(ids)) for seq, ids in chunks],
            self.attention_backend,
            self.batch_invariant,
        )
        if tokens is None:
            input_ids = torch.tensor([[token for _, ids in chunks for token in ids]], device=device)
        else:
            input_ids = tokens[None]
        # 0 means all tokens.
        keep = 0 if all_logits else batch.query_start_loc[1:].long() - 1
        with self.attached(), self._products():
            output = self.model(
                input_ids=input_ids,
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=keep,
                **{BATCH_ARGUMENT: batch},
            )
        if len(batch.layers_run) != self.tables.pool.plan.num_layers:
            raise RuntimeError(
                f"{type(self.model).__name__}: the cache reached {len(batch.layers_run)} of "
                f"{self.tables.pool.plan.num_layers} attention layers"
            )
        return output.logits[0]

    @contextmanager
    def _products(self) -> Iterator[None]:
        """Context of the matrix products of a forward pass. Batch-invariant products are a torch
        function mode: Ctrl-C is deferred so that it cannot interrupt entering or leaving one."""
        if not self.batch_invariant:
            yield
            return
        with interrupts_deferred(), InvariantProducts():
            yield
