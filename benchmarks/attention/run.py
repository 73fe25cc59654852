"""The attention benchmark with all peers and all fields of the committed run.

Beyond `halfbyte.bench.AttentionBenchmark`, and timed in CUDA graphs (`benchmarks.timing`):

    flashinfer_bf16, ...     FlashInfer on the same pages, if it is installed
    in_graph, graph          decode and store, see `benchmarks.timing`
    error, bfloat16_error    against float64, see `exact`
    backend                  halfbyte's
    single_with_plan         halfbyte's decode on a GPU: µs of a step's first layer
    evened_out               ragged: the same tokens in sequences of one length
    workspace_bytes          max memory that a call allocates, its plan and its output included
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.attention.cases import WITHOUT_PEERS, Case
from benchmarks.attention.exact import attention_error
from benchmarks.peers import flashinfer
from benchmarks.timing import measure
from halfbyte.attention import ATTENTION_BACKENDS
from halfbyte.attention.base import AttentionConfig
from halfbyte.bench import AttentionBenchmark
from halfbyte.bench import Case as UsualCase
from halfbyte.bench.attention_calls import attention_calls
from halfbyte.bench.data import Inputs, make_inputs
from halfbyte.dispatch import CPU, current_compute_capability
from halfbyte.measure.report import Row
from halfbyte.measure.timing import Call


class AttentionRun(AttentionBenchmark):
    """As `AttentionBenchmark`, with FlashInfer among the peers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.with_flashinfer = flashinfer.is_usable(self.device)

    def contenders(self, case: UsualCase) -> dict[str, Callable[[], Row]]:
        """halfbyte, FlashInfer, SDPA."""
        found = super().contenders(case)
        if isinstance(case, Case) and case.ragged:
            found = {name: found[name] for name in found if not name.startswith("sdpa_")}
        if not self.with_peers or case.name in WITHOUT_PEERS:
            return {name: found[name] for name in found if name.startswith("halfbyte_")}
        for dtype in flashinfer.formats(case) if self.with_flashinfer else ():
            for name, make in flashinfer.makers(case, dtype).items():
                found[name] = partial(self.flashinfer, case, dtype, make)
        return found

    def halfbyte(self, case: UsualCase, dtype: str) -> Row:
        """Times, errors and memory of halfbyte's attention."""
        entry = super().halfbyte(case, dtype)
        inputs = make_inputs(case, dtype, self.device, self.query_dtype)
        planning = attention_calls(case, inputs, plans=None, backend=self.backend)
        if self.device.type == "cuda" and case.kind == "decode":
            entry["single_with_plan"] = measure(planning, self.device)["single"]
        if isinstance(case, Case) and case.ragged:
            entry["evened_out"] = self._evened_out(case, dtype)
        if self.device.type == "cuda":
            entry["workspace_bytes"] = _max_allocated(planning[0])
        return {"backend": backend_of(case, inputs, self.backend), **entry}

    def errors(self, out: torch.Tensor, case: UsualCase, inputs: Inputs) -> Row:
        """Against float64, and of bfloat16."""
        error = attention_error(out, case, inputs)
        return {"error": error.ours, "bfloat16_error": error.bfloat16}

    def flashinfer(self, case: UsualCase, dtype: str, make: Callable[[Inputs], list[Call]]) -> Row:
        """Times and error of FlashInfer, without sinks and V's global scale."""
        inputs = make_inputs(case, dtype, self.device, self.query_dtype)
        calls = make(inputs)
        entry = self.times(case, calls, inputs.num_bytes)
        out: Any = calls[0]()
        if inputs.layout.v_dtype.has_global_scale:
            out = out.double() * inputs.scale
        entry["error"] = attention_error(out, case, replace(inputs, sinks=None)).ours
        return entry

    def times(self, case: UsualCase, calls: Sequence[Call], num_bytes: int | None = None) -> Row:
        """Times of calls, and rates."""
        # Prefill calls are long compared with a graph launch.
        self.measure = partial(measure, in_graph=case.kind != "prefill")
        return super().times(case, calls, num_bytes)

    def _evened_out(self, case: Case, dtype: str) -> Row:
        """Times of a batch with as many sequences and tokens, but equal lengths."""
        even = case.evened_out()
        inputs = make_inputs(even, dtype, self.device, self.query_dtype)
        calls = attention_calls(even, inputs, backend=self.backend)
        return {**measure(calls, self.device, in_graph=True), "bytes": inputs.num_bytes}


def backend_of(case: UsualCase, inputs: Inputs, backend: str | None) -> str:
    """Name of the backend that `attention_calls` uses."""
    query = inputs.query
    config = AttentionConfig(
        layout=inputs.layout,
        num_heads=case.heads,
        query_dtype=query.dtype,
        device_type=query.device.type,
        num_tokens=query.shape[0],
        num_seqs=case.batch,
        sliding_window=inputs.window,
        has_sinks=case.sinks,
        compute_capability=current_compute_capability() if query.is_cuda else CPU,
    )
    return ATTENTION_BACKENDS.select(config, explicit=backend).name


def _max_allocated(call: Call) -> int:
    """Max bytes that a call allocates."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
