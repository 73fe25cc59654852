"""FlashInfer on the same pages as halfbyte, through views of their regions.

Its host-side `plan()` is not timed. Its outputs are without sinks and without V's global scale,
which FlashInfer applies in a separate kernel.
"""

from collections.abc import Callable
from functools import partial

import torch

from halfbyte.attention.flashinfer import FlashInferAttention, workspace_bytes
from halfbyte.attention.flashinfer_views import flashinfer_dtype, kv_cache_views, page_table
from halfbyte.bench import Case
from halfbyte.bench.data import Inputs
from halfbyte.measure.report import short_name
from halfbyte.measure.timing import Call

_WORKSPACE_BYTES = 512 * 2**20


def is_usable(device: torch.device) -> bool:
    """Whether it is installed and runs on a device."""
    return device.type == "cuda" and FlashInferAttention.is_supported()[0]


def formats(case: Case) -> tuple[str, ...]:
    """Cache formats on which FlashInfer is measured.

    Every combination of format, head size and window needs another kernel, which takes 20 s or more
    to compile; hence head sizes other than 128, windows and prefill only in bfloat16.
    """
    if case.kind == "store":
        return ()
    if case.kind == "decode" and case.head_size == 128 and case.sliding_window is None:
        return ("nvfp4", "fp8_e4m3", "bfloat16")
    return ("bfloat16",)


def makers(case: Case, dtype: str) -> dict[str, Callable[[Inputs], list[Call]]]:
    """Functions that make calls on a cache in one format, by name in the report."""
    name = short_name(dtype)
    if case.kind == "decode":
        return {f"flashinfer_{name}": partial(_decode, case)}
    backends = ["fa2"]
    if torch.cuda.get_device_capability() == (9, 0):
        backends.append("fa3")
    return {
        f"flashinfer_{backend}_{name}": partial(_prefill, case, backend) for backend in backends
    }


def _workspace(case: Case, inputs: Inputs, device: torch.device) -> torch.Tensor:
    num_bytes = max(_WORKSPACE_BYTES, workspace_bytes(inputs.layout, case.heads, device))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _decode(case: Case, inputs: Inputs) -> list[Call]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    query, layout = inputs.query, inputs.layout
    table = page_table(inputs.block_tables, case.lengths().tolist(), case.block_size)
    tables = [part.to(query.device) for part in table]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(case, inputs, query.device),
        layout.order,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(tables[0]),
        paged_kv_indices_buffer=torch.empty_like(tables[1]),
        paged_kv_last_page_len_buffer=torch.empty_like(tables[2]),
        backend="fa2",
    )
    nvfp4_sm120 = layout.k_dtype.is_nvfp4 and torch.cuda.get_device_capability()[0] == 12
    wrapper.plan(
        *tables,
        case.heads,
        case.kv_heads,
        case.head_size,
        case.block_size,
        q_data_type=query.dtype,
        kv_data_type=flashinfer_dtype(layout),
        window_left=_window_left(inputs),
        q_len_per_req=case.query_tokens,
        # Splitting corrupts NVFP4 on SM120; only FlashInfer's prefill wrapper avoids it.
        disable_split_kv=nvfp4_sm120,
    )
    return _runs(wrapper, inputs)


def _prefill(case: Case, backend: str, inputs: Inputs) -> list[Call]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    query, layout = inputs.query, inputs.layout
    table = page_table(inputs.block_tables, case.lengths().tolist(), case.block_size)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        _workspace(case, inputs, query.device), layout.order, backend=backend
    )
    wrapper.plan(
        inputs.query_start_loc.cpu(),
        table.indptr,
        table.indices,
        table.last_page_len,
        case.heads,
        case.kv_heads,
        case.head_size,
        case.block_size,
        causal=True,
        window_left=_window_left(inputs),
        q_data_type=query.dtype,
        kv_data_type=flashinfer_dtype(layout),
    )
    return _runs(wrapper, inputs)


def _window_left(inputs: Inputs) -> int:
    """FlashInfer counts the tokens before the query's own; -1 for no window."""
    return -1 if inputs.window is None else inputs.window - 1


def _runs(wrapper, inputs: Inputs) -> list[Call]:  # type: ignore[no-untyped-def]
    query, out = inputs.query, torch.empty_like(inputs.query)
    k_scale = float(inputs.scale) if inputs.layout.k_dtype.has_global_scale else None

    def call(pages: torch.Tensor) -> torch.Tensor:
        views = kv_cache_views(pages, inputs.layout)
        return wrapper.run(query, views.data, out=out, k_scale=k_scale, kv_cache_sf=views.scales)

    return [partial(call, pages) for pages in inputs.pools]
