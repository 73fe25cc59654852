"""What others take for the same work: FlashInfer where it is installed, and PyTorch's SDPA.

FlashInfer reads the very pages that halfbyte reads, through views of their regions; what it does on
the host in `plan()` is done beforehand. Its outputs come without sinks and without the global scale
of V, which it applies in a kernel of its own. SDPA gets dense K and V of equal lengths and, for
decoding, the group folded into its query dimension, which is far faster than `enable_gqa`.
"""

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.attention.flashinfer import FlashInferAttention, workspace_bytes
from halfbyte.attention.flashinfer_views import flashinfer_dtype, kv_cache_views, page_table
from halfbyte.bench.cases import Case
from halfbyte.bench.data import Cache, copies, short_name
from halfbyte.bench.subjects import Queries

Calls = list[Callable[[], torch.Tensor]]
_WORKSPACE_BYTES = 512 * 2**20


def flashinfer_version() -> str | None:
    """FlashInfer's version where it can be measured, else None."""
    return metadata.version("flashinfer-python") if FlashInferAttention.is_supported()[0] else None


def flashinfer_formats(case: Case) -> tuple[str, ...]:
    """The caches on which FlashInfer is measured.

    Every pair of format and head size, with or without a window, is one more kernel to compile, for
    20 s or more; hence other head sizes than 128, windows and prefill in bfloat16 alone.
    """
    if case.kind == "store":
        return ()
    if case.kind == "decode" and case.head_size == 128 and case.sliding_window is None:
        return ("nvfp4", "fp8_e4m3", "bfloat16")
    return ("bfloat16",)


def flashinfer_peers(case: Case, dtype: str) -> dict[str, Callable[[Cache, Queries], Calls]]:
    """Makers of calls on a cache in one format, by name in the report."""
    name = short_name(dtype)
    if case.kind == "decode":
        return {f"flashinfer_{name}": partial(_flashinfer_decode, case)}
    backends = ["fa2"]
    if torch.cuda.get_device_capability() == (9, 0):
        backends.append("fa3")
    return {
        f"flashinfer_{backend}_{name}": partial(_flashinfer_prefill, case, backend)
        for backend in backends
    }


def sdpa_peers(case: Case, device: torch.device) -> dict[str, Callable[[], Calls]]:
    """Makers of calls on dense K and V; none where SDPA cannot do the work as it is."""
    plain = case.kind == "prefill" or (case.kind == "decode" and case.query_tokens == 1)
    if case.ragged or case.sinks or case.sliding_window or not plain:
        return {}
    # On a CPU float32 as well, which can be the faster.
    dtypes = [torch.bfloat16, torch.float32] if device.type == "cpu" else [torch.bfloat16]
    make = _sdpa_prefill if case.kind == "prefill" else _sdpa_decode
    return {f"sdpa_{short_name(str(x)[6:])}": partial(make, case, x, device) for x in dtypes}


def _workspace(case: Case, cache: Cache, device: torch.device) -> torch.Tensor:
    num_bytes = max(_WORKSPACE_BYTES, workspace_bytes(cache.layout, case.heads, device))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _flashinfer_decode(case: Case, cache: Cache, queries: Queries) -> Calls:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    query, layout = queries.query, cache.layout
    table = page_table(cache.block_tables, case.lengths().tolist(), case.block_size)
    tables = [part.to(query.device) for part in table]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(case, cache, query.device),
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
        window_left=_window_left(cache),
        q_len_per_req=case.query_tokens,
        # FlashInfer knows this of its prefill wrapper alone: there, splitting corrupts NVFP4.
        disable_split_kv=nvfp4_sm120,
    )
    return _flashinfer_runs(wrapper, cache, query)


def _flashinfer_prefill(case: Case, backend: str, cache: Cache, queries: Queries) -> Calls:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    query, layout = queries.query, cache.layout
    table = page_table(cache.block_tables, case.lengths().tolist(), case.block_size)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        _workspace(case, cache, query.device), layout.order, backend=backend
    )
    wrapper.plan(
        queries.start_loc.cpu(),
        table.indptr,
        table.indices,
        table.last_page_len,
        case.heads,
        case.kv_heads,
        case.head_size,
        case.block_size,
        causal=True,
        window_left=_window_left(cache),
        q_data_type=query.dtype,
        kv_data_type=flashinfer_dtype(layout),
    )
    return _flashinfer_runs(wrapper, cache, query)


def _window_left(cache: Cache) -> int:
    """FlashInfer counts the tokens before the query's own; -1 for no window."""
    return -1 if cache.window is None else cache.window - 1


def _flashinfer_runs(wrapper, cache: Cache, query: torch.Tensor) -> Calls:  # type: ignore[no-untyped-def]
    out = torch.empty_like(query)
    k_scale = float(cache.scale) if cache.layout.k_dtype.has_global_scale else None

    def call(pages: torch.Tensor) -> torch.Tensor:
        views = kv_cache_views(pages, cache.layout)
        return wrapper.run(query, views.data, out=out, k_scale=k_scale, kv_cache_sf=views.scales)

    return [partial(call, pages) for pages in cache.pools]


def _sdpa_decode(case: Case, dtype: torch.dtype, device: torch.device) -> Calls:
    key_values = _dense(case, dtype, device, case.kv_heads)
    shape = (case.batch, case.kv_heads, case.group, case.head_size)
    query = torch.randn(shape, dtype=dtype, device=device)
    return [partial(F.scaled_dot_product_attention, query, *kv) for kv in key_values]


def _sdpa_prefill(case: Case, dtype: torch.dtype, device: torch.device) -> Calls:
    # CPUs are slow at `enable_gqa`: there, every query head gets K and V of its own.
    repeat = 1 if device.type == "cuda" else case.group
    key_values = _dense(case, dtype, device, case.kv_heads, repeat)
    shape = (case.batch, case.heads, case.query_tokens, case.head_size)
    query = torch.randn(shape, dtype=dtype, device=device)
    causal: dict[str, Any] = {"is_causal": True}
    if case.query_tokens < case.context:
        causal = {"attn_mask": _mask_of_the_last(case.query_tokens, case.context, device)}
    attend = partial(F.scaled_dot_product_attention, enable_gqa=repeat == 1, **causal)
    return [partial(attend, query, *kv) for kv in key_values]


def _mask_of_the_last(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Causal, for queries at the end of the keys."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys)
    # There, PyTorch would make this of it in every call.
    return torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril(keys - queries)


def _dense(
    case: Case, dtype: torch.dtype, device: torch.device, kv_heads: int, repeat: int = 1
) -> list[torch.Tensor]:
    """K and V `[2, batch, kv_heads * repeat, context, head_size]`, in several copies."""
    shape = (2, case.batch, kv_heads, case.context, case.head_size)
    num_bytes = torch.Size(shape).numel() * repeat * dtype.itemsize
    first = torch.randn(shape, dtype=dtype, device=device).repeat_interleave(repeat, dim=2)
    return [first, *(first.clone() for _ in range(copies(num_bytes, device) - 1))]
