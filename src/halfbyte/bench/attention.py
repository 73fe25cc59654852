"""The attention benchmark: store, decode and prefill, halfbyte beside its peers, in one run.

Every case and every one who takes part in it stands alone: a failure is noted in one line, and the
rest goes on. The report is a plain dict, as it is written to JSON:

    date, gpu, machine, versions
    read_terabytes_per_s, copy_terabytes_per_s    of this machine, in this run
    microseconds: one row per case
        name, kind, batch, context, ...           the fields of `Case`
        halfbyte_nvfp4, flashinfer_bf16, sdpa_bf16, ...
            single, back_to_back                  µs, see `timing`
            in_graph                              the same, on a GPU: decode and store
            graph                                 on a GPU: whether captured in a CUDA graph
            single_with_plan                      halfbyte's decode: µs of a step's first layer
            evened_out                            ragged: the same tokens in sequences of one length
            bytes, terabytes_per_s, fraction      decode: cache read, store: bytes read and written;
                                                  over `back_to_back`; of what the machine reads
                                                  (decode) or copies (store)
            teraflops_per_s                       prefill: multiplications and additions, unmasked
            error, bfloat16_error                 see `exact`
            backend, workspace_bytes              halfbyte's; the most memory a call allocates, its
                                                  plan and its output included
            failed                                instead of all that: why
"""

import datetime
import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import torch

from halfbyte.attention import check_attention_backend
from halfbyte.bench import peers, subjects
from halfbyte.bench.cases import WITHOUT_PEERS, Case
from halfbyte.bench.data import Cache, make_cache, short_name
from halfbyte.bench.exact import attention_error
from halfbyte.bench.machine import machine, versions
from halfbyte.bench.peers import flashinfer_version
from halfbyte.bench.report import entries
from halfbyte.bench.subjects import Queries
from halfbyte.bench.timing import Call, bandwidths, measure
from halfbyte.layouts import KVCacheDType

_LARGEST_ERROR = 0.05
"""Beyond this it is no rounding error: bfloat16 gives about 0.003."""
Row = dict[str, Any]
Report = dict[str, Any]


class Benchmark:
    """Measures cases and collects the report.

    Args:
        device: to measure on.
        dtypes: names of halfbyte's cache formats.
        with_peers: whether to measure others, too.
        backend: halfbyte's attention backend, None for the best.
        query_dtype: of halfbyte's and FlashInfer's queries.

    Raises:
        ValueError: an unknown format, or `auto`.
    """

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[str] = ("nvfp4",),
        *,
        with_peers: bool = True,
        backend: str | None = None,
        query_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device = device
        self.query_dtype = query_dtype
        self.dtypes = list(dict.fromkeys(KVCacheDType.parse(name).value for name in dtypes))
        if KVCacheDType.AUTO in self.dtypes:
            raise ValueError("KV cache dtype: 'auto' is a model's choice; name a format")
        check_attention_backend(backend, device)
        self.with_peers = with_peers
        self.with_flashinfer = (
            with_peers and device.type == "cuda" and flashinfer_version() is not None
        )
        self.backend = backend
        read, copied = bandwidths(device)
        self.report: Report = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "machine": machine(device),
            "versions": versions(),
            "read_terabytes_per_s": read,
            "copy_terabytes_per_s": copied,
            "microseconds": [],
        }

    def failures(self, *, ours: bool = False) -> list[str]:
        """One line for each measurement that failed, or for each of halfbyte's own."""
        return [
            f"{row['name']}: {name}: {entry['failed']}"
            for row in self.report["microseconds"]
            for name, entry in entries(row).items()
            if "failed" in entry and (name.startswith("halfbyte_") or not ours)
        ]

    def run(self, case: Case) -> Row:
        """Measure a case and append its row to the report."""
        row: Row = asdict(case)
        if case.kind == "store":
            for dtype in self.dtypes:
                self._note(row, f"halfbyte_{short_name(dtype)}", partial(self._store, case, dtype))
        else:
            self._attention(case, row)
        gc.collect()
        self.report["microseconds"].append(row)
        return row

    def _attention(self, case: Case, row: Row) -> None:
        # Both are made when first asked for, so that a failure is noted, and shared by all.
        queries = lru_cache(partial(Queries.make, case, self.device, self.query_dtype))
        with_peers = self.with_peers and case.name not in WITHOUT_PEERS
        others = peers.flashinfer_formats(case) if self.with_flashinfer and with_peers else ()
        for dtype in dict.fromkeys([*self.dtypes, *others]):
            cache = lru_cache(partial(make_cache, case, dtype, self.device))
            if dtype in self.dtypes:
                name = f"halfbyte_{short_name(dtype)}"
                self._note(row, name, partial(self._halfbyte, case, cache, queries))
            if dtype in others:
                for name, make in peers.flashinfer_peers(case, dtype).items():
                    self._note(row, name, partial(self._peer, case, cache, queries, make))
        if with_peers:
            for name, make_dense in peers.sdpa_peers(case, self.device).items():
                self._note(row, name, partial(self._dense_peer, case, make_dense))

    def _note(self, row: Row, name: str, measured: Callable[[], Row]) -> None:
        try:
            row[name] = measured()
        except Exception as error:  # whatever a kernel, ours or a peer's, may raise
            row[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a GPU that failed for good says so in every row
                torch.cuda.empty_cache()

    def _halfbyte(
        self, case: Case, make_cache: Callable[[], Cache], make_queries: Callable[[], Queries]
    ) -> Row:
        cache, queries = make_cache(), make_queries()
        backend = subjects.attention_backend(case, cache, queries, self.backend)
        calls = subjects.attention_calls(case, cache, queries, self.backend)
        entry = {"backend": backend, **self._times(case, calls, cache.num_bytes)}
        planning = subjects.attention_calls(case, cache, queries, self.backend, plan_inside=True)
        if self.device.type == "cuda" and case.kind == "decode":
            entry["single_with_plan"] = measure(planning, self.device)["single"]
        if case.ragged:
            entry["evened_out"] = self._evened_out(case, cache.layout.k_dtype)
        if self.device.type == "cuda":
            entry["workspace_bytes"] = _most_allocated(planning[0])
        error = attention_error(calls[0](), queries.query, case, cache, queries.sinks)
        entry["error"], entry["bfloat16_error"] = error
        if not entry["error"] < _LARGEST_ERROR:
            raise RuntimeError(f"wrong results: error {entry['error']:.3g} against float64")
        return entry

    def _evened_out(self, case: Case, dtype: str) -> Row:
        """Times of a batch of as many sequences of one length, with as many tokens in all."""
        even = case.evened_out()
        cache = make_cache(even, dtype, self.device)
        queries = Queries.make(even, self.device, self.query_dtype)
        calls = subjects.attention_calls(even, cache, queries, self.backend)
        return {**measure(calls, self.device, in_graph=True), "bytes": cache.num_bytes}

    def _peer(
        self,
        case: Case,
        make_cache: Callable[[], Cache],
        make_queries: Callable[[], Queries],
        make_calls: Callable[[Cache, Queries], peers.Calls],
    ) -> Row:
        cache, queries = make_cache(), make_queries()
        calls = make_calls(cache, queries)
        entry = self._times(case, calls, cache.num_bytes)
        out = calls[0]()
        if cache.layout.v_dtype.has_global_scale:
            out = out.double() * cache.scale
        entry["error"] = attention_error(out, queries.query, case, cache, None).ours
        return entry

    def _dense_peer(self, case: Case, make_calls: Callable[[], peers.Calls]) -> Row:
        return self._times(case, make_calls())

    def _store(self, case: Case, dtype: str) -> Row:
        calls, num_bytes = subjects.store_calls(case, dtype, self.device)
        return self._times(case, calls, num_bytes)

    def _times(self, case: Case, calls: Sequence[Call], num_bytes: int | None = None) -> Row:
        in_graph = case.kind != "prefill"  # whose calls are long beside the start of a graph
        entry: Row = dict(measure(calls, self.device, in_graph=in_graph))
        if case.kind == "prefill":
            operations = 4 * case.heads * case.head_size * case.pairs
            entry["teraflops_per_s"] = round(operations / entry["back_to_back"] / 1e6, 2)
        elif num_bytes is not None:
            kind = "copy" if case.kind == "store" else "read"
            rate = num_bytes / entry["back_to_back"] / 1e6
            entry["bytes"] = num_bytes
            entry["terabytes_per_s"] = round(rate, 4)
            entry["fraction"] = round(rate / self.report[f"{kind}_terabytes_per_s"], 3)
        return entry


def _most_allocated(call: Call) -> int:
    """Bytes that a call allocates at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
