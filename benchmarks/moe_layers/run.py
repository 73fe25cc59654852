"""The benchmark of experts with peers and all fields of the committed run.

All contenders of a case are timed in CUDA graphs, interleaved (`benchmarks.timing`), after their
result was compared with the reference; one whose error is more than allowed is not timed. Fields
beyond those of `halfbyte.bench.MoeBenchmark`:

    gpu_state                            driver and clocks at the end of the run, or None
    skipped                              by shape: peers that cannot run, and why
    empty                                on a GPU, times of a kernel that does nothing
    judged_by                            the timings that bounds use
    microseconds: one row per case
        bytes_hit                        of the experts hit, in the mean over the routings
        contenders                       by name: times, `error` and `allowed_error` of ours
                                         (`cuda`, `triton`, ...), peers and `dense_bf16` (PyTorch)
            plain_read                   of as many bytes: `bytes`, `terabytes_per_s`, `by`
        selected                         the backend of a layer
        single, back_to_back, in_graph   rates and ratios of times, see `moe_ratios`
    seconds                              duration of the run
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from benchmarks.linear_layers.gpu_state import gpu_state
from benchmarks.linear_layers.plain_read import plain_read
from benchmarks.linear_layers.ratios import DENSE, READ, judged_by
from benchmarks.moe_layers.ratios import moe_ratios
from benchmarks.peers.moe import MOE_PEERS
from benchmarks.program import WRONG
from benchmarks.timing import Ready, measure_empty, measure_layers, ready
from halfbyte.bench import MoeBenchmark, MoeShape
from halfbyte.bench.moe import RandomExperts
from halfbyte.measure.report import Row, or_failed
from halfbyte.measure.timing import Call
from halfbyte.moe import select_moe_kernel

Maker = Callable[[torch.Tensor], list[Call]]
"""Takes x `[M, H]`; returns calls over routings and copies of the weights."""


class MoeRun(MoeBenchmark):
    """As `MoeBenchmark`, beside peers.

    Args:
        device: of the tensors.
        shapes, tokens, backends, dtype: as for `MoeBenchmark`.
        peers: names of `MOE_PEERS`, or None for all; NoImplementationError for an unknown one.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[MoeShape] = (),
        tokens: Sequence[int] = (),
        backends: Sequence[str] = (),
        peers: Sequence[str] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._begin = time.perf_counter()
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.peers = MOE_PEERS.names() if peers is None else list(peers)
        for name in self.peers:
            MOE_PEERS.get(name)
        super().__init__(device, shapes, tokens, backends, dtype)
        self._reads: dict[int, tuple[str, list[Call]]] = {}
        self.report |= {
            "gpu_state": None,
            "skipped": {},
            "empty": None,
            "judged_by": list(judged_by(device.type == "cuda")),
            "seconds": None,
        }

    def run(self) -> Iterator[Row]:
        """Measure all cases; yields each row after adding it to the report."""
        if self.device.type == "cuda":
            self.report["empty"] = measure_empty(self.device)
        for experts, makers, m in self._cases():
            row = self._row(experts, makers, m)
            self.report["microseconds"].append(row)
            self.report["seconds"] = round(time.perf_counter() - self._begin, 3)
            if (experts.shape, m) == self.cases[-1]:
                self.report["gpu_state"] = gpu_state(self.device)
            yield row

    def warm_up(self) -> None:
        """Call every contender once on every case, so that what it keeps on disk is compiled."""
        for experts, makers, m in self._cases():
            x = experts.x(m)
            for make in makers.values():
                with suppress(Exception):  # it will recur in the measurement, which records it
                    make(x)[0]()

    def _cases(self) -> Iterator[tuple[RandomExperts, dict[str, Maker], int]]:
        experts, makers = None, dict[str, Maker]()
        for shape, m in self.cases:
            if experts is None or experts.shape != shape:
                experts = None  # frees its memory first
                makers.clear()
                experts = RandomExperts(shape, self.device, self.dtype)
                makers |= self._makers(experts)
            yield experts, makers, m

    def _makers(self, experts: RandomExperts) -> dict[str, Maker]:
        """The contenders for one shape, by name; those that cannot run are noted."""
        config = experts.shape.config(self.dtype, self.device)
        verdicts = [v for v in MOE_PEERS.explain(config) if v.name in self.peers]
        skipped = {v.name: v.reason for v in verdicts if not v.usable}
        self.report["skipped"][str(experts.shape)] = skipped
        makers: dict[str, Maker] = {x: partial(experts.calls, x) for x in self.backends}
        for name in (v.name for v in verdicts if v.usable):
            makers[name] = partial(MOE_PEERS.get(name)(config).calls, experts)
        return {**makers, DENSE: experts.dense_calls}

    def _row(self, experts: RandomExperts, makers: dict[str, Maker], m: int) -> Row:
        x, num_bytes = experts.x(m), experts.bytes_hit(m)
        series: dict[str, Ready] = {}

        def prepare(name: str) -> Row:
            calls = makers[name](x)
            error, allowed = experts.error(x, calls[0]())
            if not error <= allowed:  # also for NaN
                raise RuntimeError(f"{WRONG}: error {error:.3g}, allowed {allowed:.3g}")
            series[name] = ready(calls, self.device, in_graph=True)
            return {"error": float(f"{error:.3g}"), "allowed_error": float(f"{allowed:.3g}")}

        entries = {name: or_failed(partial(prepare, name)) for name in makers}
        by, reads = self._read(num_bytes)
        series[READ] = ready(reads, self.device, in_graph=True)
        for name, times in measure_layers(series, self.device, m).items():
            entries[name] = {**times, **entries.get(name, {})}
        rate = num_bytes / entries[READ][self.report["judged_by"][0]] / 1e6
        entries[READ] |= {"bytes": num_bytes, "terabytes_per_s": round(rate, 4), "by": by}
        row = {
            "name": f"{experts.shape} M={m}",
            "shape": str(experts.shape),
            "m": m,
            "bytes_hit": num_bytes,
            "contenders": entries,
            "selected": select_moe_kernel(experts.shape.config(self.dtype, self.device)).name,
        }
        return {**row, **moe_ratios(row, self.report["read_terabytes_per_s"])}

    def _read(self, num_bytes: int) -> tuple[str, list[Call]]:
        """`plain_read` of as many bytes; only the latest number is cached."""
        num_bytes -= num_bytes % 16
        if num_bytes not in self._reads:
            self._reads.clear()
            self._reads[num_bytes] = plain_read(num_bytes, self.device)
        return self._reads[num_bytes]
