"""FlashInfer's entries in plain PyTorch, as its documentation says they behave (0.7.0).

They read exactly their arguments, on a CPU and without a compiler, so that tests can check views,
tables, scales and options.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attention.cases import dense

Pair = tuple[torch.Tensor, torch.Tensor]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
_VALUES = torch.cat([_E2M1, -_E2M1])


def tokens_of(
    cache: Pair, scales: Pair | None, kv_layout: str, pages: torch.Tensor, length: int
) -> Pair:
    """float64 K and V `[length, heads, D]` of a sequence, without global scales."""

    def picked(part: torch.Tensor) -> torch.Tensor:
        # Indexed as bytes: PyTorch indexes few one-byte floats.
        values = part.view(torch.uint8)[pages].view(part.dtype)
        return (values.transpose(1, 2) if kv_layout == "HND" else values).flatten(0, 1)[:length]

    def decoded(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        packed = picked(data)
        codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)  # low nibble first
        return _VALUES[codes.long()] * picked(scale).double().repeat_interleave(16, dim=-1)

    if scales is None:
        return picked(cache[0]).double(), picked(cache[1]).double()
    return decoded(cache[0], scales[0]), decoded(cache[1], scales[1])


class _Wrapper:
    """Common part of both wrappers: the plan, and attention by it."""

    plans: ClassVar[int] = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 * 2**20
        self.kv_layout = kv_layout
        self.buffers = options

    def _plan(
        self,
        starts: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *shape: int,
        **options: Any,
    ) -> None:
        type(self).plans += 1
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        self.heads, self.kv_heads, self.head_dim, self.page_size = shape
        counts = (indptr[1:] - indptr[:-1]).tolist()
        self.starts = starts
        self.pages = indices.long().split(counts)
        self.lengths = [
            (count - 1) * self.page_size + last
            for count, last in zip(counts, last_page_len.tolist(), strict=True)
        ]
        self.options = options

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        kv_cache_sf: Pair | None = None,
    ) -> Any:
        assert q.shape == (self.starts[-1], self.heads, self.head_dim)
        assert q.dtype == self.options["q_data_type"]
        assert k_scale is None or isinstance(k_scale, float)
        tokens, heads = (2, 1) if self.kv_layout == "HND" else (1, 2)
        for cache in paged_kv_cache:
            assert cache.dtype == self.options["kv_data_type"]
            assert (cache.shape[heads], cache.shape[tokens]) == (self.kv_heads, self.page_size)
        assert (kv_cache_sf is not None) == (paged_kv_cache[0].dtype == torch.uint8)
        assert paged_kv_cache[0].stride() == paged_kv_cache[1].stride()
        window = self.options.get("window_left", -1)
        scale = self.options.get("sm_scale") or self.head_dim**-0.5
        results = [
            dense(
                q[self.starts[i] : self.starts[i + 1]],
                *tokens_of(paged_kv_cache, kv_cache_sf, self.kv_layout, pages, length),
                length=length,
                scale=scale * (1.0 if k_scale is None else k_scale),
                dtype=torch.float64,
                sliding_window=None if window == -1 else window + 1,
                softcap=self.options.get("logits_soft_cap"),
            )
            for i, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True))
        ]
        values = torch.cat([rows for rows, _ in results]) * (1.0 if v_scale is None else v_scale)
        result = values.to(q.dtype) if out is None else out.copy_(values)
        base_2 = torch.cat([lse for _, lse in results]).float() / math.log(2)
        return (result, base_2) if return_lse else result


class PrefillWrapper(_Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`: causal, ragged queries."""

    def plan(self, qo_indptr: torch.Tensor, *tables: Any, causal: bool, **options: Any) -> None:
        """Positional arguments up to the page size, as FlashInfer's."""
        assert causal
        assert qo_indptr.dtype == torch.int32
        self._plan(qo_indptr.tolist(), *tables[:3], *self._shape(*tables[3:]), **options)

    @staticmethod
    def _shape(heads: int, kv_heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
        return heads, kv_heads, head_dim, page_size


class DecodeWrapper(_Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` in its CUDA graph mode: equal numbers of queries."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *shape: int,
        q_len_per_req: int = 1,
        disable_split_kv: bool = False,
        **options: Any,
    ) -> None:
        """Positional arguments up to the page size, as FlashInfer's."""
        assert self.buffers["use_cuda_graph"]
        for name, tensor in (
            ("indptr", indptr),
            ("indices", indices),
            ("last_page_len", last_page_len),
        ):
            assert len(self.buffers[f"paged_kv_{name}_buffer"]) >= len(tensor)
        starts = [i * q_len_per_req for i in range(len(last_page_len) + 1)]
        self._plan(starts, indptr, indices, last_page_len, *shape, **options)


def _trtllm(
    query: torch.Tensor,
    kv_cache: Pair,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: torch.Tensor,
    bmm2_scale: float,
    window_left: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_layout: str,
    kv_cache_sf: Pair,
    query_lens: list[int],
) -> None:
    """trtllm-gen's contract: FP8 in and out, V scales interleaved in groups of four tokens."""
    assert query.dtype == out.dtype == torch.float8_e4m3fn
    assert kv_layout == "HND"
    assert not workspace_buffer.any()
    k_scales, v_scales = kv_cache_sf
    pages, _, tokens, blocks = v_scales.shape
    # FlashInfer's `nvfp4_quantize_paged_kv_cache`, undone: of a head's tile, (t, s) lies at
    # (t // 4) * 4 * S + s * 4 + t % 4.
    tile = v_scales.view(torch.uint8).reshape(pages, -1, tokens // 4, blocks, 4)
    linear = tile.transpose(-1, -2).reshape(v_scales.shape).view(v_scales.dtype)
    begin = 0
    for i, (count, length) in enumerate(zip(query_lens, seq_lens.tolist(), strict=True)):
        table = block_tables[i, : -(-length // tokens)].long()
        key, value = tokens_of(kv_cache, (k_scales, linear), "HND", table, length)
        assert max(key.abs().max(), value.abs().max()) <= 448, "E4M3 saturates"
        rows, _ = dense(
            query[begin : begin + count].double(),
            key,
            value,
            length,
            float(bmm1_scale),
            torch.float64,
            sliding_window=None if window_left == -1 else window_left + 1,
            sinks=sinks,
        )
        out[begin : begin + count] = (rows * bmm2_scale).to(out.dtype)
        begin += count
    assert begin == query.shape[0]


def trtllm_decode(*, max_seq_len: int, q_len_per_req: int, backend: str, **arguments: Any) -> None:
    """`trtllm_batch_decode_with_kv_cache`."""
    assert backend == "trtllm-gen"
    assert max_seq_len == int(arguments["seq_lens"].max())
    _trtllm(**arguments, query_lens=[q_len_per_req] * len(arguments["seq_lens"]))


def trtllm_context(
    *,
    max_q_len: int,
    max_kv_len: int,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    **arguments: Any,
) -> None:
    """`trtllm_batch_context_with_kv_cache`."""
    lens = [(x[1:] - x[:-1]).tolist() for x in (cum_seq_lens_q, cum_seq_lens_kv)]
    assert (max_q_len, max_kv_len, batch_size) == (max(lens[0]), max(lens[1]), len(lens[0]))
    assert lens[1] == arguments["seq_lens"].tolist()
    _trtllm(**arguments, query_lens=lens[0])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import flashinfer` find these, on a machine whose GPU looks like an H200."""
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    decode: Any = ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache = trtllm_decode
    prefill: Any = ModuleType("flashinfer.prefill")
    prefill.trtllm_batch_context_with_kv_cache = trtllm_context
    for name, value in (("", module), (".decode", decode), (".prefill", prefill)):
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", value)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
