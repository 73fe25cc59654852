"""The linear benchmark: x times NVFP4 weights by every backend that runs, in one run.

Beside them PyTorch's product with the same weights in bfloat16 (on a GPU, cuBLAS) and, for few rows
of x, a plain read of as many bytes as the packed weights have. Results are compared with float64. A
failure, or a wrong result of ours, is noted in one line, and the rest goes on; a peer that is less
exact than allowed is marked. The report is a plain dict,
as it is written to JSON:

    date, gpu, machine, versions
    gpu_state                                     driver and clocks at the end of the run, or None
    read_terabytes_per_s, copy_terabytes_per_s    of this machine, in this run: 4 GiB
    dtype                                         of x and of the results
    backends, unusable                            that were measured; that cannot run, and why
    warm_up                                       seconds of compiling ahead, and what failed
    empty                                         on a GPU, times of a kernel that does nothing
    judged_by                                     the timings that bounds go by
    microseconds: one row per case
        shape, n, k, m                            weights `[n, k]`, x `[m, k]`
        subjects                                  by name:
            single, back_to_back, in_graph        µs, see `timing`; the last on a GPU
            graph                                 on a GPU: whether captured in a CUDA graph
            error, allowed_error                  against float64, over the largest value
            bytes, terabytes_per_s, by            `plain_read`: by `judged_by`; what reads
            inexact                               true if a peer's error is more than allowed
            failed                                instead of all that: why
        selected, selected_without_hint           what a layer takes that knows m, or does not
        single, back_to_back, in_graph            ratios of times, see `linear_bounds`
    bounds                                        what must hold, see `linear_bounds`
    seconds                                       the whole run
"""

import datetime
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from halfbyte.bench.linear_bounds import DENSE, OURS, READ, bounds, judged_by, ratios
from halfbyte.bench.linear_cases import (
    CPU_ROWS,
    CPU_SHAPES,
    GPU_ROWS,
    GPU_SHAPES,
    MOST_ROWS,
    LinearCase,
    Shape,
    linear_cases,
)
from halfbyte.bench.linear_read import plain_read
from halfbyte.bench.linear_warm_up import KEPT_ON_DISK, compile_ahead, warm_up
from halfbyte.bench.linear_weights import Weights, dense_calls, layer_calls
from halfbyte.bench.machine import gpu_state, machine, versions
from halfbyte.bench.timing import (
    Call,
    Ready,
    Times,
    bandwidths,
    measure_in_turns,
    ready,
    spacer,
)
from halfbyte.dispatch import CPU, current_compute_capability
from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearLayerConfig, select_nvfp4_linear_kernel

_ROUNDS = {"cuda": 4, "cpu": 2}
_BUDGET_US = {"cuda": 2e5, "cpu": 3e5}
_READ_ROWS = 16
"""Of x at most, where reading the weights is what takes the time."""
_WRONG = "wrong results"
_INEXACT = 2.0
"""Up to so many times the allowed error a peer is inexact; beyond, wrong."""
_HOT_ROWS, _REST_S = 256, 0.05
"""From so many rows of x a GPU reaches its power limit, and rests before every turn."""
Row = dict[str, Any]
Report = dict[str, Any]
Maker = Callable[[torch.Tensor], Sequence[Callable[[], Any]]]
"""Calls on x, one for each copy of the weights."""


class LinearBenchmark:
    """Measures cases and collects the report.

    Args:
        device: to measure on.
        shapes: of weights, N x K; by default the usual ones of the kind of device.
        rows: numbers of rows of x.
        backends: names of `LINEAR_BACKENDS`; by default all that can run, the slow ones for few
            rows only.
        dtype: of x.

    Raises:
        ValueError: a shape or a number of rows that cannot be.
        NoImplementationError: an unknown backend, or none that can run is left.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[Shape] | None = None,
        rows: Sequence[int] | None = None,
        backends: Sequence[str] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._begin = time.perf_counter()
        on_gpu = device.type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else device
        self.dtype = dtype
        self.shapes = list(dict.fromkeys(shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)))
        self.rows = list(dict.fromkeys(rows or (GPU_ROWS if on_gpu else CPU_ROWS)))
        self.cases = linear_cases(self.shapes, self.rows)
        verdicts = LINEAR_BACKENDS.explain(self._config(self.cases[0]))
        for name in backends or (None,):
            LINEAR_BACKENDS.select(self._config(self.cases[0]), explicit=name)  # may raise
        usable = [verdict.name for verdict in verdicts if verdict.usable]
        self.backends = list(dict.fromkeys(backends or usable))
        self.most_rows = {} if backends else MOST_ROWS
        self.report: Report = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(self.device) if on_gpu else None,
            "machine": machine(self.device),
            "versions": versions(),
            "gpu_state": None,
            "read_terabytes_per_s": None,
            "copy_terabytes_per_s": None,
            "dtype": str(self.dtype).removeprefix("torch."),
            "backends": self.backends,
            "unusable": {v.name: v.reason for v in verdicts if not v.usable},
            "warm_up": None,
            "empty": None,
            "judged_by": list(judged_by(on_gpu)),
            "microseconds": [],
            "bounds": [],
            "seconds": None,
        }

    def failures(self, *, ours: bool = False) -> list[str]:
        """One line for each measurement that failed, or for halfbyte's own and wrong results."""
        return [
            f"{row['shape']} M={row['m']}: {name}: {entry['failed']}"
            for row in self.report["microseconds"]
            for name, entry in row["subjects"].items()
            if "failed" in entry
            and (not ours or name in (*OURS, "reference") or entry["failed"].startswith(_WRONG))
        ]

    def run(self) -> Iterator[Row]:
        """Measure all cases; each row is in the report when it comes."""
        if self.device.type == "cuda":
            self.report["warm_up"] = compile_ahead(
                self.shapes, self.rows, self.backends, self._compile
            )
        read, copied = bandwidths(self.device)
        self.report["read_terabytes_per_s"], self.report["copy_terabytes_per_s"] = read, copied
        if self.device.type == "cuda":
            self.report["empty"] = self._empty()
        for shape in self.shapes:
            weights = Weights(shape, self.device, self.dtype)
            subjects = _Subjects(weights, self.backends)
            for case in self.cases:
                if (case.n, case.k) == shape:
                    row = self._case(case, weights, subjects)
                    self.report["microseconds"].append(row)
                    self.report["bounds"] = bounds(self.report)
                    self.report["seconds"] = round(time.perf_counter() - self._begin, 1)
                    if case == self.cases[-1]:
                        self.report["gpu_state"] = gpu_state(self.device)
                    yield row
            del weights, subjects
            self._tidy()

    def warm_up(self) -> None:
        """Have the backends compile what they keep on disk, and measure nothing."""
        kept = [name for name in KEPT_ON_DISK if name in self.backends]
        warm_up(self.shapes, self.rows, kept, self.device, self.dtype)

    def _empty(self) -> Times:
        """Times of a kernel that does next to nothing: what starting one takes."""
        subject = ready([spacer(self.device)], self.device, in_graph=True)
        return measure_in_turns({"": subject}, self.device, _ROUNDS["cuda"])[""]

    def _compile(self) -> None:
        """Compile our CUDA kernels, which are kept by this process alone."""
        if "cuda" in self.backends:
            for shape in self.shapes:
                with suppress(Exception):  # it will be met again, and noted
                    Weights(shape, self.device, self.dtype).layer("cuda")
        self._tidy()

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a GPU that failed for good says so in every row
                torch.cuda.empty_cache()

    def _case(self, case: LinearCase, weights: Weights, subjects: "_Subjects") -> Row:
        x = weights.x(case.m)
        entries: dict[str, Row] = {}
        outs: dict[str, torch.Tensor] = {}
        series: dict[str, Ready] = {}
        for name, make in subjects.makers.items():
            if case.m > (_READ_ROWS if name == READ else self.most_rows.get(name, case.m)):
                continue
            try:
                calls = make(x)
                if name != READ:
                    outs[name] = calls[0]()
                series[name] = ready(calls, self.device, in_graph=True)
                entries[name] = {}
            except Exception as error:  # whatever a kernel, ours or a peer's, may raise
                entries[name] = {"failed": _one_line(error)}
                outs.pop(name, None)
        kind = self.device.type
        rest = _REST_S if kind == "cuda" and case.m >= _HOT_ROWS else 0.0
        times = measure_in_turns(series, self.device, _ROUNDS[kind], _BUDGET_US[kind], rest)
        errors = weights.errors(x, outs, subjects.dense)
        for name, found in times.items():
            if name == READ:
                entries[name] = _read_entry(
                    found, case.weight_bytes, subjects.read_by, self.report["judged_by"][0]
                )
            else:
                peer = name not in (*OURS, "reference", *subjects.dense_names)
                entries[name] = _entry(found, errors.of[name], errors.allowed, peer)
        row = {
            "shape": case.shape,
            **asdict(case),
            "subjects": entries,
            "selected": select_nvfp4_linear_kernel(self._config(case, case.m)).name,
            "selected_without_hint": select_nvfp4_linear_kernel(self._config(case)).name,
        }
        return {**row, **ratios(row, self.backends)}

    def _config(self, case: LinearCase, m_hint: int | None = None) -> NvFp4LinearLayerConfig:
        on_gpu = self.device.type == "cuda"
        return NvFp4LinearLayerConfig(
            n=case.n,
            k=case.k,
            dtype=self.dtype,
            m_hint=m_hint,
            device_type=self.device.type,
            compute_capability=current_compute_capability(self.device) if on_gpu else CPU,
        )


class _Subjects:
    """All who take part for one shape: what they need of the weights, made once."""

    def __init__(self, weights: Weights, backends: Sequence[str]) -> None:
        dtypes = {DENSE: torch.bfloat16}
        if weights.device.type == "cpu":
            dtypes["dense_fp32"] = torch.float32  # which can be the faster there
        dense = {name: weights.dense(dtype) for name, dtype in dtypes.items()}
        self.dense, self.dense_names = dense[DENSE][0], tuple(dense)
        self.makers: dict[str, Maker] = {}
        for name in backends:
            try:
                self.makers[name] = partial(layer_calls, weights.layers(name))
            except Exception as error:  # whatever a library may raise
                self.makers[name] = partial(_raise, error.with_traceback(None))
        for name, copies in dense.items():
            self.makers[name] = partial(dense_calls, copies)
        num_bytes = weights.codes.nbytes + weights.scales.nbytes
        self.read_by, calls = plain_read(num_bytes, weights.device)
        self.makers[READ] = lambda x: calls


def _entry(times: Times, error: float, allowed: float, peer: bool) -> Row:
    exact = error <= allowed  # NaN is not
    if not (exact or (peer and error <= _INEXACT * allowed)):
        return {"failed": f"{_WRONG}: error {error:.3g} against float64, allowed {allowed:.3g}"}
    entry = {**times, "error": float(f"{error:.3g}"), "allowed_error": float(f"{allowed:.3g}")}
    return entry if exact else {**entry, "inexact": True}


def _read_entry(times: Times, num_bytes: int, read_by: str, timing: str) -> Row:
    rate = num_bytes / float(times[timing]) / 1e6
    return {**times, "bytes": num_bytes, "terabytes_per_s": round(rate, 4), "by": read_by}


def _raise(error: Exception, x: torch.Tensor) -> Sequence[Call]:
    raise error.with_traceback(None)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
