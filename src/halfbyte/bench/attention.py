"""The attention benchmark: halfbyte's decode, prefill and store, and PyTorch's SDPA."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from halfbyte.attention import check_attention_backend
from halfbyte.bench.attention_calls import attention_calls, sdpa_calls, sdpa_dtypes, store_calls
from halfbyte.bench.cases import Case
from halfbyte.bench.data import Inputs, make_inputs
from halfbyte.layouts import KVCacheDType
from halfbyte.measure.report import Row, bandwidth, new_report, or_failed, short_name
from halfbyte.measure.timing import Call, Times, measure

_MAX_ERROR = 0.05  # far above rounding: bfloat16 gives about 0.003


class AttentionBenchmark:
    """Measures cases and collects `report`.

    A row has the fields of its `Case` and for each contender (`halfbyte_nvfp4`, `sdpa_bf16`) its
    times; `bytes` moved, `terabytes_per_s` and `fraction` of the machine's read (decode) or copy
    (store) bandwidth; for prefill `teraflops_per_s`; for halfbyte also `error`.

    Args:
        dtypes: names of halfbyte's cache formats; ValueError for an unknown one, or `auto`.
        with_peers: whether to measure SDPA too.
        backend: halfbyte's attention backend, None for the best; ValueError if it cannot run.
        query_dtype: of halfbyte's queries.
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
        self.device, self.with_peers, self.backend = device, with_peers, backend
        self.dtypes = list(dict.fromkeys(KVCacheDType.parse(name).value for name in dtypes))
        if KVCacheDType.AUTO in self.dtypes:
            raise ValueError("KV cache dtype: 'auto' is a model's choice; name a format")
        check_attention_backend(backend, device)
        self.query_dtype = query_dtype
        self.measure: Callable[[Sequence[Call], torch.device], Times] = measure
        self.report = new_report(device)

    def run(self, case: Case) -> Row:
        """Measure a case and append its row to the report."""
        row: Row = asdict(case)
        row |= {name: or_failed(measured) for name, measured in self.contenders(case).items()}
        self.report["microseconds"].append(row)
        return row

    def contenders(self, case: Case) -> dict[str, Callable[[], Row]]:
        """Measuring functions by contender name."""
        ours = self.store if case.kind == "store" else self.halfbyte
        found: dict[str, Callable[[], Row]] = {}
        for name in self.dtypes:
            found[f"halfbyte_{short_name(name)}"] = partial(ours, case, name)
        for dtype in sdpa_dtypes(case, self.device) if self.with_peers else ():
            found[f"sdpa_{short_name(str(dtype)[6:])}"] = partial(self.sdpa, case, dtype)
        return found

    def halfbyte(self, case: Case, dtype: str) -> Row:
        """Times and error of halfbyte's attention."""
        inputs = make_inputs(case, dtype, self.device, self.query_dtype)
        calls = attention_calls(case, inputs, backend=self.backend)
        entry = self.times(case, calls, inputs.num_bytes)
        entry |= self.errors(calls[0](), case, inputs)
        if not entry["error"] < _MAX_ERROR:
            raise RuntimeError(f"wrong results: error {entry['error']:.3g}")
        return entry

    def errors(self, out: torch.Tensor, case: Case, inputs: Inputs) -> Row:
        """Max error relative to the max value of the reference, over each sequence's last token."""
        last = inputs.query_start_loc[1:].long() - 1
        starts = torch.arange(len(last) + 1, dtype=torch.int32, device=self.device)
        of_last = replace(inputs, query=inputs.query[last].float(), query_start_loc=starts)
        exact = attention_calls(case, of_last, backend="reference")[0]()
        return {"error": float((out[last] - exact).abs().max() / exact.abs().max())}

    def store(self, case: Case, dtype: str) -> Row:
        """Times of halfbyte's store."""
        return self.times(case, *store_calls(case, dtype, self.device))

    def sdpa(self, case: Case, dtype: torch.dtype) -> Row:
        """Times of PyTorch's SDPA."""
        return self.times(case, sdpa_calls(case, dtype, self.device))

    def times(self, case: Case, calls: Sequence[Call], num_bytes: int | None = None) -> Row:
        """Times of calls, and rates by `back_to_back`."""
        entry: Row = {**self.measure(calls, self.device)}
        if case.kind == "prefill":
            operations = 4 * case.heads * case.head_size * case.pairs
            entry["teraflops_per_s"] = round(operations / entry["back_to_back"] / 1e6, 2)
        elif num_bytes is not None:
            peak = self.report[f"{'copy' if case.kind == 'store' else 'read'}_terabytes_per_s"]
            entry |= bandwidth(num_bytes, entry["back_to_back"], peak)
        return entry
