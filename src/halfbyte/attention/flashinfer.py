"""FlashInfer's kernels (0.7.0 on), reading halfbyte's pages in place.

- **fa2**, SM80 and later: 16-bit, FP8 and NVFP4 caches with linear block scales, pages of any
  number of tokens. The prefill wrapper serves decoding as well: both run the same kernels, and it
  alone knows where split KV must be off (NVFP4 on SM120). It silently ignores attention sinks, so
  they are refused here.
- **trtllm-gen**, SM100 and SM103: NVFP4 with V scales in the `sm100` order. Its NVFP4 kernels exist
  for FP8 queries and FP8 output only, so both are rounded; and it multiplies codes by block scales
  in E4M3, where a product above 448 saturates. Block scales must therefore not exceed 72, which a
  global scale of `amax / 448` ensures (as in FlashInfer's `nvfp4_quantize_paged_kv_cache`) and the
  usual `amax / (6 * 448)` does not. The scales of every call's own tokens are checked, so that each
  token is checked in the step that wrote it.

Both plan on the host: lengths are read back once per step, which syncs the GPU and cannot be
captured in a graph, and kernels are compiled at first use. So this backend is never chosen by
default, only by name.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from halfbyte.attention.base import AttentionBackend, AttentionConfig, AttentionInputs
from halfbyte.attention.flashinfer_views import flashinfer_dtype, kv_cache_views, page_table
from halfbyte.dispatch import Answer, runs_on_gpu
from halfbyte.kernels.runtime.flashinfer_package import missing_flashinfer
from halfbyte.layouts import PageLayout

_HALF_TYPES = (torch.bfloat16, torch.float16)
_FA2_HEAD_SIZES = (64, 128, 256)
_TRTLLM_GEN_CAPABILITIES = (100, 103)
_TRTLLM_GEN_HEAD_SIZES = (128, 256)
_TRTLLM_GEN_BLOCK_SIZES = (16, 32, 64)
_TRTLLM_GEN_MAX_DECODE_QUERIES = 8
"""Max query tokens per sequence for its decode function, as in FlashInfer's tests."""
_MAX_SCALE = 0x69
"""E4M3 byte of 72, the largest block scale whose product with 6 does not exceed 448."""
_NAN_SCALE = 0x7F
_MAX_QUERY_TILE = 128
_MIN_WORKSPACE = 128 * 2**20
"""Workspace bytes that FlashInfer recommends."""


class FlashInferAttention(AttentionBackend):
    """fa2 for linear scales, trtllm-gen for the `sm100` order; compiled at first use."""

    name: ClassVar[str] = "flashinfer"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where FlashInfer and a compiler are installed."""
        purpose = "runs if requested: FlashInfer's kernels on our pages"
        return runs_on_gpu(compute_capability, 80, missing_flashinfer, purpose)

    @classmethod
    def can_implement(cls, config: AttentionConfig) -> Answer:
        """What the kernels' formats, head sizes and options allow."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.batch_invariant:
            return False, "splits sequences by the batch: not batch-invariant"
        if config.layout.v_scale_layout == "sm100":
            reason = _trtllm_gen_reason(config)
        else:
            reason = _fa2_reason(config)
        return reason is None, reason or "FlashInfer's kernels on our pages"

    @classmethod
    def forward(cls, inputs: AttentionInputs) -> None:
        """See `AttentionBackend.forward`.

        Raises:
            ValueError: pages that the kernels cannot read in place, or (trtllm-gen) block scales
                that they cannot multiply.
        """
        work = inputs.plans.get(_WorkKey(), lambda: _work(inputs))
        if work.rows is not None:
            inputs.out.zero_()
            if inputs.lse is not None:
                inputs.lse.fill_(-math.inf)
        if not work.seq_lens:
            return
        run = _run_trtllm_gen if inputs.layout.v_scale_layout == "sm100" else _run_fa2
        out, lse = run(inputs, work)
        if work.rows is not None:
            inputs.out[work.rows] = out.to(inputs.out.dtype)
        elif out is not inputs.out:
            inputs.set_output(out.to(inputs.query.dtype))
        if inputs.lse is not None:
            assert lse is not None
            # FlashInfer's logarithms are to base 2.
            inputs.lse[slice(None) if work.rows is None else work.rows] = lse * math.log(2)


@dataclass(frozen=True)
class _Work:
    """Lengths on the host; sequences and query tokens that attend to nothing are dropped."""

    query_lens: list[int]
    seq_lens: list[int]
    rows: torch.Tensor | None
    """int64: rows of the query that are kept; None for all."""
    sequences: torch.Tensor | None
    """int64: sequences that are kept; None for all."""

    def query(self, inputs: AttentionInputs) -> torch.Tensor:
        """The kept rows, with strides for aligned 16-byte loads."""
        query = inputs.query
        if self.rows is not None:
            return query[self.rows]
        stride = math.gcd(query.stride(0), query.stride(1)) * query.element_size()
        if query.stride(2) != 1 or query.data_ptr() % 16 or stride % 16:
            return query.clone(memory_format=torch.contiguous_format)
        return query

    def block_tables(self, inputs: AttentionInputs) -> torch.Tensor:
        """The tables of the kept sequences."""
        tables = inputs.block_tables
        return tables if self.sequences is None else tables[self.sequences]


class _WorkKey(NamedTuple):
    """`_Work` depends on the lengths alone."""


class _PlanKey(NamedTuple):
    """What a wrapper's plan depends on besides the lengths."""

    layout: PageLayout
    num_heads: int
    query_dtype: torch.dtype
    scale: float
    softcap: float | None
    sliding_window: int | None
    block_tables: tuple[int, torch.Size, tuple[int, ...]]
    """Address, shape and strides."""


def _work(inputs: AttentionInputs) -> _Work:
    starts, lengths = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    left = [min(count, length) for count, length in zip(counts, lengths, strict=True)]
    if left == counts and all(counts):
        return _Work(counts, lengths, None, None)
    # FlashInfer's causal mask is wrong where there are more queries than keys.
    kept = [i for i, count in enumerate(left) if count]
    rows = [np.arange(starts[i + 1] - left[i], starts[i + 1]) for i in kept]
    device = inputs.query.device
    return _Work(
        [left[i] for i in kept],
        [lengths[i] for i in kept],
        torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows])).to(device),
        torch.tensor(kept, dtype=torch.int64, device=device),
    )


def _run_fa2(inputs: AttentionInputs, work: _Work) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and base-2 LSE of `work`."""
    layout, query = inputs.layout, work.query(inputs)
    views = kv_cache_views(inputs.pages, layout)
    tables = inputs.block_tables
    key = _PlanKey(
        layout,
        query.shape[1],
        query.dtype,
        inputs.scale,
        inputs.softcap,
        inputs.sliding_window,
        (tables.data_ptr(), tables.shape, tables.stride()),
    )
    # The tables are kept with the plan, so that their memory is not reused.
    wrapper, _ = inputs.plans.get(key, lambda: (_planned_fa2(inputs, work, query), tables))
    out = inputs.out
    direct = work.rows is None and out.dtype == query.dtype and out.is_contiguous()
    result = wrapper.run(
        query,
        views.data,
        k_scale=float(inputs.k_scale) if layout.k_dtype.has_global_scale else None,
        v_scale=float(inputs.v_scale) if layout.v_dtype.has_global_scale else None,
        out=out if direct and out.data_ptr() % 16 == 0 else None,
        return_lse=inputs.lse is not None,
        kv_cache_sf=views.scales,
    )
    return result if inputs.lse is not None else (result, None)


def _planned_fa2(inputs: AttentionInputs, work: _Work, query: torch.Tensor) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    layout = inputs.layout
    num_bytes = workspace_bytes(layout, query.shape[1], query.device)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
    # Planning copies asynchronously from the wrapper's pinned memory. A later wrapper may reuse it,
    # but only after lengths were read back again, which syncs.
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, layout.order, backend="fa2")
    table = page_table(work.block_tables(inputs), work.seq_lens, layout.block_size)
    wrapper.plan(
        torch.tensor([0, *work.query_lens], device="cpu").cumsum(0).int(),
        table.indptr,
        table.indices,
        table.last_page_len,
        query.shape[1],
        layout.num_kv_heads,
        layout.head_size,
        layout.block_size,
        causal=True,
        sm_scale=inputs.scale,
        window_left=_window_left(inputs),
        logits_soft_cap=inputs.softcap,
        q_data_type=query.dtype,
        kv_data_type=flashinfer_dtype(layout),
    )
    return wrapper


def workspace_bytes(layout: PageLayout, num_heads: int, device: torch.device) -> int:
    """Bytes for the partial results of split sequences (`PrefillPlanImpl` in `scheduler.cuh`)."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    chunks = 2 * num_sms // layout.num_kv_heads
    rows = num_heads * chunks * _MAX_QUERY_TILE
    return max(_MIN_WORKSPACE, 4 * rows * (layout.head_size_v + 1) + 2**20)


def _window_left(inputs: AttentionInputs) -> int:
    """FlashInfer counts the tokens before the query's own; -1 for no window."""
    return -1 if inputs.sliding_window is None else inputs.sliding_window - 1


def _run_trtllm_gen(inputs: AttentionInputs, work: _Work) -> tuple[torch.Tensor, None]:
    """Output of `work` in float32."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache

    views = kv_cache_views(inputs.pages, inputs.layout)
    tables = work.block_tables(inputs).contiguous()
    _check_new_scales(inputs, work, tables)
    query, device = work.query(inputs), inputs.query.device
    amax = query.abs().amax().float().clamp_min(1e-12)
    rounded = (query.float() * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = torch.empty_like(rounded)
    common: dict[str, Any] = {
        "query": rounded,
        "kv_cache": views.data,
        "workspace_buffer": torch.zeros(_MIN_WORKSPACE, dtype=torch.uint8, device=device),
        "block_tables": tables,
        "seq_lens": torch.tensor(work.seq_lens, dtype=torch.int32, device=device),
        "bmm1_scale": (amax / 448 * inputs.scale * inputs.k_scale).float().reshape(1),
        "bmm2_scale": 1.0,
        "window_left": _window_left(inputs),
        "out": out,
        "sinks": None if inputs.sinks is None else inputs.sinks.float().contiguous(),
        "kv_layout": "HND",
        "kv_cache_sf": views.scales,
    }
    longest = max(work.query_lens)
    if min(work.query_lens) == longest <= _TRTLLM_GEN_MAX_DECODE_QUERIES:
        trtllm_batch_decode_with_kv_cache(
            **common, max_seq_len=max(work.seq_lens), q_len_per_req=longest, backend="trtllm-gen"
        )
    else:
        starts, kv_starts = (
            torch.tensor([0, *lens], device="cpu").cumsum(0).int().to(device)
            for lens in (work.query_lens, work.seq_lens)
        )
        trtllm_batch_context_with_kv_cache(
            **common,
            max_q_len=longest,
            max_kv_len=max(work.seq_lens),
            batch_size=len(work.seq_lens),
            cum_seq_lens_q=starts,
            cum_seq_lens_kv=kv_starts,
        )
    return out.float() * inputs.v_scale, None


def _check_new_scales(inputs: AttentionInputs, work: _Work, tables: torch.Tensor) -> None:
    """Raise ValueError where a block scale of a query token would saturate in trtllm-gen."""
    layout, device = inputs.layout, inputs.pages.device
    lens = zip(work.query_lens, work.seq_lens, strict=True)
    positions = np.concatenate([np.arange(length - count, length) for count, length in lens])
    sequences = np.repeat(np.arange(len(work.seq_lens)), work.query_lens)
    block, offset, sequence = (
        torch.from_numpy(x).to(device)
        for x in (positions // layout.block_size, positions % layout.block_size, sequences)
    )
    page = tables[sequence, block].long()
    views = layout.views(inputs.pages)
    assert views.k_scale is not None
    assert views.v_scale is not None
    row, column = layout.v_scale_position(device)
    v_scale = views.v_scale.transpose(2, 3)[page[:, None], row[offset], column[offset]]
    for name, scale in (("K", views.k_scale[page, offset]), ("V", v_scale)):
        magnitude = scale & 0x7F
        if ((magnitude > _MAX_SCALE) & (magnitude != _NAN_SCALE)).any():
            raise ValueError(
                f"pages: a block scale of {name} exceeds 72, and trtllm-gen multiplies codes by "
                "scales in E4M3, where the product saturates at 448; store with a global scale of "
                "at least amax / 448"
            )


def _fa2_reason(config: AttentionConfig) -> str | None:
    layout = config.layout
    dtype = flashinfer_dtype(layout)
    if dtype is None:
        return (
            "fa2 reads nvfp4, fp8, bfloat16 or float16, K and V alike, not "
            f"K {layout.k_dtype} with V {layout.v_dtype}"
        )
    if layout.head_size != layout.head_size_v or layout.head_size not in _FA2_HEAD_SIZES:
        return f"head sizes 64, 128 and 256, not {layout.head_size} and {layout.head_size_v}"
    if config.query_dtype not in _HALF_TYPES:
        return f"query in bfloat16 or float16, not {config.query_dtype}"
    if dtype in _HALF_TYPES and dtype != config.query_dtype:
        return f"a cache in {dtype} needs a query in it, not in {config.query_dtype}"
    if config.has_sinks:
        return "fa2 has no attention sinks"
    return None


def _trtllm_gen_reason(config: AttentionConfig) -> str | None:
    layout = config.layout
    if config.compute_capability not in _TRTLLM_GEN_CAPABILITIES:
        return f"V scales in sm100 order are for SM100, not {config.compute_capability / 10}"
    if not layout.k_dtype.is_nvfp4:
        return f"trtllm-gen reads K in nvfp4 as well, not in {layout.k_dtype}"
    if layout.order != "HND":
        return "trtllm-gen reads HND pages in place; it would copy NHD in every call"
    if layout.head_size != layout.head_size_v or layout.head_size not in _TRTLLM_GEN_HEAD_SIZES:
        return f"head sizes 128 and 256, not {layout.head_size} and {layout.head_size_v}"
    if layout.block_size not in _TRTLLM_GEN_BLOCK_SIZES:
        return f"pages of 16, 32 or 64 tokens, not {layout.block_size}"
    if config.softcap:
        return "trtllm-gen has no softcap"
    if config.return_lse:
        return "trtllm-gen does not promise a log-sum-exp of FP8 queries"
    return None
