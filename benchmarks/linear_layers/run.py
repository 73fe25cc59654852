"""The linear benchmark with all usable backends and all fields of the committed run.

Also measures PyTorch with the same weights in bfloat16 (on a GPU, cuBLAS) and, for small M, a plain
read of the packed weights' bytes. All are timed in CUDA graphs, interleaved (`benchmarks.timing`).
Fields beyond those of `halfbyte.bench.LinearBenchmark`:

    gpu_state                                     driver and clocks at the end of the run, or None
    unusable                                      backends that cannot run, and why
    warm_up                                       seconds of compiling ahead, and what failed
    empty                                         on a GPU, times of a kernel that does nothing
    judged_by                                     the timings that bounds use
    microseconds: one row per case
        contenders                                by name, also:
            in_graph, graph                       on a GPU, see `benchmarks.timing`
            bytes, terabytes_per_s, by            `plain_read`: by `judged_by`; its name
            inexact                               true if a peer's error is more than allowed
        selected, selected_without_hint           backend of a layer with and without a hint of M
        single, back_to_back, in_graph            ratios of times, see `ratios`
    bounds                                        see `bounds`
    seconds                                       duration of the run
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.linear_layers.bounds import bounds
from benchmarks.linear_layers.gpu_state import gpu_state
from benchmarks.linear_layers.plain_read import plain_read
from benchmarks.linear_layers.ratios import DENSE, OURS, READ, judged_by, ratios
from benchmarks.linear_layers.warm_up import compile_ahead
from benchmarks.linear_layers.weights import PeerWeights
from benchmarks.program import WRONG
from benchmarks.timing import Ready, measure_empty, measure_layers, ready
from halfbyte.bench import LinearBenchmark
from halfbyte.bench.linear import Shape
from halfbyte.linear import LINEAR_BACKENDS, select_nvfp4_linear_kernel
from halfbyte.measure.report import Row, or_failed
from halfbyte.measure.timing import Call, Times

GPU_TOKENS = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 256, 257, 300, 384, 512, 513, 640, 768, 1024),
    *(1536, 2048, 3072, 4096, 8192),
)
"""Powers of two, one more than that, and some between them."""
MAX_TOKENS = {"reference": 16, READ: 16}
"""Max M of backends that are too slow for more (unless requested), and of the plain read, which is
a bound only where reading the weights dominates."""
_INEXACT = 2.0
"""A peer's error up to this multiple of the allowed one counts as inexact, beyond as wrong."""
Maker = Callable[[torch.Tensor], Sequence[Call]]
"""Takes x `[M, K]`; returns calls that multiply it, one per copy of the weights."""


class LinearRun(LinearBenchmark):
    """As `LinearBenchmark`; by default with all usable backends."""

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[Shape] = (),
        tokens: Sequence[int] = (),
        backends: Sequence[str] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._begin = time.perf_counter()
        on_gpu = device.type == "cuda"
        if on_gpu:
            device, tokens = torch.device("cuda", torch.cuda.current_device()), tokens or GPU_TOKENS
        super().__init__(device, shapes, tokens, backends, dtype)
        if not backends:
            self.backends = usable_backends(device, dtype)
        verdicts = LINEAR_BACKENDS.explain(LinearBenchmark.config((64, 64), dtype, device))
        self.max_tokens = {READ: MAX_TOKENS[READ]} if backends else MAX_TOKENS
        self.report |= {
            "backends": self.backends,
            "gpu_state": None,
            "unusable": {v.name: v.reason for v in verdicts if not v.usable},
            "warm_up": None,
            "empty": None,
            "judged_by": list(judged_by(on_gpu)),
            "bounds": [],
            "seconds": None,
        }

    def run(self) -> Iterator[Row]:
        """Measure all cases; yields each row after adding it to the report."""
        shapes = list(dict.fromkeys(shape for shape, _ in self.cases))
        tokens = list(dict.fromkeys(m for _, m in self.cases))
        if self.device.type == "cuda":
            self.report["warm_up"] = compile_ahead(
                shapes, tokens, self.backends, partial(self._compile, shapes)
            )
            self.report["empty"] = measure_empty(self.device)
        for shape in shapes:
            weights = PeerWeights(shape, self.device, self.dtype)
            makers = self._makers(weights)
            for m in tokens:
                row = self._row(weights, makers, m)
                self.report["microseconds"].append(row)
                self.report["bounds"] = bounds(self.report)
                self.report["seconds"] = round(time.perf_counter() - self._begin, 3)
                if (shape, m) == self.cases[-1]:
                    self.report["gpu_state"] = gpu_state(self.device)
                yield row

    def _compile(self, shapes: Sequence[Shape]) -> None:
        """Compile halfbyte's CUDA kernels, which are cached only in this process."""
        for shape in shapes if "cuda" in self.backends else ():
            with suppress(Exception):  # it will recur in the measurement, which records it
                PeerWeights(shape, self.device, self.dtype).layer("cuda")

    def _makers(self, weights: PeerWeights) -> dict[str, Maker]:
        """The contenders for one shape, by name."""
        dense = {DENSE: torch.bfloat16}
        if self.device.type == "cpu":
            dense["dense_fp32"] = torch.float32  # can be faster on CPUs
        makers: dict[str, Maker] = {x: partial(weights.calls, x) for x in self.backends}
        makers |= {x: partial(weights.dense_calls, dtype=dtype) for x, dtype in dense.items()}
        self._read_by, reads = plain_read(weights.codes.nbytes + weights.scales.nbytes, self.device)
        return {**makers, READ: lambda x: reads}

    def _row(self, weights: PeerWeights, makers: dict[str, Maker], m: int) -> Row:
        x = weights.x(m)
        outs: dict[str, torch.Tensor] = {}
        series: dict[str, Ready] = {}

        def prepare(name: str) -> Row:
            calls: Any = makers[name](x)
            outs[name] = calls[0]()
            series[name] = ready(calls, self.device, in_graph=True)
            return {}

        chosen = [name for name in makers if m <= self.max_tokens.get(name, m)]
        entries = {name: or_failed(partial(prepare, name)) for name in chosen}
        for name, found in measure_layers(series, self.device, m).items():
            if name == READ:
                entries[name] = self._read_entry(found, weights)
            else:
                entries[name] = _entry(name, found, *weights.error(x, outs[name]))
        n, k = weights.shape
        row = {
            "shape": f"{n}x{k}",
            "n": n,
            "k": k,
            "m": m,
            "contenders": entries,
            "selected": self._selected(weights.shape, m),
            "selected_without_hint": self._selected(weights.shape, None),
        }
        return {**row, **ratios(row, self.backends)}

    def _selected(self, shape: Shape, m: int | None) -> str:
        return select_nvfp4_linear_kernel(self.config(shape, self.dtype, self.device, m)).name

    def _read_entry(self, times: Times, weights: PeerWeights) -> Row:
        num_bytes = weights.codes.nbytes + weights.scales.nbytes
        rate = num_bytes / float(times[self.report["judged_by"][0]]) / 1e6
        rounded = {"bytes": num_bytes, "terabytes_per_s": round(rate, 4)}
        return {**times, **rounded, "by": self._read_by}


def usable_backends(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Names of the backends that can run here, in order of preference."""
    verdicts = LINEAR_BACKENDS.explain(LinearBenchmark.config((64, 64), dtype, device))
    return [verdict.name for verdict in verdicts if verdict.usable]


def _entry(name: str, times: Times, error: float, allowed: float) -> Row:
    peer = name not in (*OURS, "reference") and not name.startswith("dense_")
    exact = error <= allowed  # False for NaN
    if not (exact or (peer and error <= _INEXACT * allowed)):
        return {"failed": f"{WRONG}: error {error:.3g} against float64, allowed {allowed:.3g}"}
    entry = {**times, "error": float(f"{error:.3g}"), "allowed_error": float(f"{allowed:.3g}")}
    return entry if exact else {**entry, "inexact": True}
