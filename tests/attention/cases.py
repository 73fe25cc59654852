"""Random ragged batches on packed pages, and expected attention results in float64."""

from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.attention import AttentionConfig
from halfbyte.kvcache import get_kv_cache_quant_method, read_tokens, reshape_and_cache
from halfbyte.kvcache.recent import RecentInputs
from halfbyte.layouts import PageLayout
from kvcache.transforms import SEGMENT, make_transform, on


@dataclass
class Case:
    """A batch: arguments of `paged_attention`, and the slot of every token."""

    query: torch.Tensor
    pages: torch.Tensor
    layout: PageLayout
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: torch.Tensor
    slots: list[torch.Tensor]
    k_scale: float
    v_scale: float
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Keyword arguments of `paged_attention` besides query and pages; tensors on a device."""
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        arguments = {
            "layout": self.layout,
            "query_start_loc": starts,
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32),
            "block_tables": self.block_tables,
            "scale": self.layout.head_size**-0.5,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            **self.options,
        }
        return {name: on(value, device) for name, value in arguments.items()}

    def read(self, slots: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence in float64; zeros before the window of all its queries."""
        length = len(slots)
        window = self.options.get("sliding_window") or length
        first = min(length, max(0, length - queries - window + 1))
        rows = read_tokens(
            self.pages,
            slots[first:],
            self.layout,
            self.k_scale,
            self.v_scale,
            torch.float64,
            transform=self.options.get("transform"),
            positions=torch.arange(first, length),
        )
        key, value = (torch.cat([x.new_zeros(first, *x.shape[1:]), x]) for x in rows)
        return key, value

    def exact(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, unquantized, in the query's dtype."""
        first, last = sum(self.seq_lens[:seq]), sum(self.seq_lens[: seq + 1])
        key, value = (x[first:last].to(self.query.dtype) for x in (self.key, self.value))
        return key, value

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE by plain masked softmax on the dequantized cache, all in `dtype`."""
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        begin = 0
        for n, length, slots in zip(self.query_lens, self.seq_lens, self.slots, strict=True):
            options = dict(self.options)
            options.pop("transform", None)
            recent = options.pop("recent", None)
            key, value = self.read(slots, n)
            if recent is not None:
                options["recent"] = (*self.exact(len(outs)), recent.tokens)
            query = self.query[begin : begin + n]
            scale = self.arguments()["scale"]
            out, lse = dense(query, key, value, length, scale, dtype, **options)
            outs.append(out)
            lses.append(lse)
            begin += n
        return torch.cat(outs), torch.cat(lses)


def config(**changes: Any) -> AttentionConfig:
    """An `AttentionConfig`: by default a decode step on an nvfp4 cache on SM90."""
    fields: dict[str, Any] = {
        "layout": PageLayout("nvfp4", "nvfp4", 128, None, 8, 16),
        "num_heads": 32,
        "query_dtype": torch.bfloat16,
        "device_type": "cuda",
        "num_tokens": 64,
        "num_seqs": 64,
        "compute_capability": 90,
    }
    return AttentionConfig(**{**fields, **changes})


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    scale: float,
    dtype: torch.dtype,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    recent: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence, query by query, written for clarity.

    Args:
        recent: `(K, V, reach)`, unquantized K and V, read by queries less than `reach` tokens away.
    """
    n, heads, _ = query.shape
    kv_heads = key.shape[1]
    out = torch.zeros(n, heads, value.shape[-1], dtype=dtype)
    lse = torch.full((n, heads), -torch.inf, dtype=dtype)
    # Of bfloat16 numbers, products are summed in float32.
    sums = torch.promote_types(dtype, torch.float32)
    query, key, value = (x.to(dtype).to(sums) for x in (query, key, value))
    for i in range(n):
        at = length - n + i
        first = 0 if sliding_window is None else max(0, at - sliding_window + 1)
        q = query[i].unflatten(0, (kv_heads, -1))
        k, v = (x[first : max(0, at + 1)] for x in (key, value))
        if recent is not None:
            begin = max(first, at + 1 - recent[2])
            k, v = (
                torch.cat([x[: begin - first], exact[begin : max(0, at + 1)].to(dtype).to(sums)])
                for x, exact in ((k, recent[0]), (v, recent[1]))
            )
        logits = torch.einsum("hgd,thd->hgt", q, k).to(dtype) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(dtype).view(kv_heads, -1, 1)], 2)
        if logits.numel() == 0:
            continue
        weights = logits.softmax(2)[..., : len(k)].to(sums)
        out[i] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1)
        lse[i] = logits.logsumexp(2).flatten()
    return out, lse


def make_case(
    *,
    k_dtype: str = "nvfp4",
    v_dtype: str | None = None,
    head_size: int = 64,
    head_size_v: int | None = None,
    kv_heads: int = 2,
    group: int = 4,
    block_size: int = 16,
    order: str = "HND",
    v_scale_layout: str = "linear",
    query_lens: tuple[int, ...] = (1, 5, 1, 17),
    seq_lens: tuple[int, ...] = (1, 40, 77, 17),
    query_dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    seed: int = 0,
    transform: dict[str, Any] | None = None,
    recent: int = 0,
    **options: Any,
) -> Case:
    """Fresh random inputs, ragged lengths, a permuted page table, NaN bytes in unwritten slots.

    With the arguments of a transform, every other sequence begins with a token that it knows. With
    a number of recent tokens, rings hold those before the queries, and NaN elsewhere.
    """
    torch.manual_seed(seed)
    layout = PageLayout(
        k_dtype,
        v_dtype or k_dtype,
        head_size,
        head_size_v,
        kv_heads,
        block_size,
        order,  # type: ignore[arg-type]
        v_scale_layout,  # type: ignore[arg-type]
    )
    counts = [-(-length // block_size) for length in seq_lens]
    num_pages = sum(counts) + 3
    # 0xFF is NaN as a scale of any format and as bfloat16: unwritten slots must never be read.
    pages = torch.full((num_pages, layout.page_bytes + 32), 0xFF, dtype=torch.uint8)
    order_of_pages = torch.randperm(num_pages)
    block_tables = torch.zeros((len(seq_lens), max([1, *counts])), dtype=torch.int32)
    slots, used = [], 0
    for i, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        table = order_of_pages[used : used + count]
        used += count
        block_tables[i, :count] = table.int()
        positions = torch.arange(length)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
    total = sum(seq_lens)
    key = torch.randn(total, kv_heads, head_size)
    value = torch.randn(total, kv_heads, layout.head_size_v)
    k_method = get_kv_cache_quant_method(layout.k_dtype)
    v_method = get_kv_cache_quant_method(layout.v_dtype)
    k_scale = k_method.global_scale_from_amax(5.0)
    v_scale = v_method.global_scale_from_amax(6.0)
    all_slots = torch.cat([torch.empty(0, dtype=torch.int64), *slots])
    changed: dict[str, Any] = {}
    if transform is not None:
        segments = 1 + max(seq_lens) // transform.get("segment", SEGMENT)
        changes = make_transform(kv_heads, head_size, head_size_v, segments=segments, **transform)
        options["transform"] = changes
        positions = torch.cat([torch.arange(length) for length in seq_lens])
        means = changes.means(positions)
        key = key if means is None else key + means
        if changes.first_keys is not None and changes.first_values is not None:
            for i, first in enumerate((positions == 0).nonzero().flatten()[::2]):
                index = i % len(changes.first_keys)
                key[first], value[first] = changes.first_keys[index], changes.first_values[index]
        changed = {"transform": changes, "positions": positions, "backend": "reference"}
    reshape_and_cache(key, value, pages, all_slots, layout, k_scale, v_scale, **changed)
    if recent:
        options["recent"] = _recent_inputs(key, value, recent, query_lens, seq_lens, query_dtype)
    heads = kv_heads * group
    if sinks:
        options["sinks"] = torch.randn(heads) * 2
    query = torch.randn(sum(query_lens), heads, head_size).to(query_dtype)
    return Case(
        query,
        pages,
        layout,
        list(query_lens),
        list(seq_lens),
        block_tables,
        slots,
        k_scale,
        v_scale,
        key,
        value,
        options,
    )


def _recent_inputs(
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    dtype: torch.dtype,
) -> RecentInputs:
    """`RecentInputs` from K and V of all tokens, sequences concatenated."""
    ring, entries = tokens + 16, torch.randperm(len(seq_lens) + 3)[: len(seq_lens)]
    rings, own = [], []
    for x in (key, value):
        kept = torch.full((len(seq_lens) + 3, x.shape[1], ring, x.shape[2]), torch.nan)
        new, begin = [], 0
        for entry, n, length in zip(entries, query_lens, seq_lens, strict=True):
            rows = x[begin : begin + length]
            begin += length
            old = max(0, length - n)
            for position in range(max(0, old - ring), old):
                kept[entry, :, position % ring] = rows[position]
            new += [torch.zeros(n - length + old, *x.shape[1:]), rows[old:]]
        rings.append(kept.to(dtype))
        own.append(torch.cat(new).to(dtype))
    return RecentInputs(tokens, rings[0], rings[1], entries.int(), own[0], own[1])


def assert_close_to_exact(out: torch.Tensor, case: Case) -> None:
    """Tier 2: at most twice the error of a bfloat16 computation on the same dequantized cache."""
    exact, _ = case.expected()
    baseline, _ = case.expected(torch.bfloat16)
    error = (out.double() - exact).abs().max()
    allowed = 2 * (baseline.double() - exact).abs().max() + 1e-5 * exact.abs().max()
    assert not out.isnan().any()
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}"


_LENGTHS: dict[str, Any] = {"query_lens": (1,) * 6, "seq_lens": (1, 40, 77, 17, 300, 0)}
DECODE_CASES: dict[str, dict[str, Any]] = {
    "d128": {"head_size": 128, **_LENGTHS},
    "d64": {"head_size": 64, **_LENGTHS},
    "d256": {"head_size": 256, **_LENGTHS},
    "k64-v128": {"head_size": 64, "head_size_v": 128, **_LENGTHS},
    "mha": {"head_size": 128, "group": 1, "kv_heads": 3, **_LENGTHS},
    "group-8": {"head_size": 128, "group": 8, **_LENGTHS},
    "group-5": {"head_size": 64, "group": 5, **_LENGTHS},
    "mqa-32": {"head_size": 64, "group": 32, "kv_heads": 1, **_LENGTHS},
    "mqa-40-d128": {"head_size": 128, "group": 40, "kv_heads": 1, **_LENGTHS},
    "mqa-16-d256": {"head_size": 256, "group": 16, "kv_heads": 1, "block_size": 64, **_LENGTHS},
    "mqa-40-k64-v128": {
        "head_size": 64,
        "head_size_v": 128,
        "group": 40,
        "kv_heads": 1,
        "query_dtype": torch.float16,
        **_LENGTHS,
    },
    "group-32-k128-v64-nhd": {
        "head_size": 128,
        "head_size_v": 64,
        "group": 32,
        "order": "NHD",
        "block_size": 48,
        **_LENGTHS,
    },
    "mqa-16-sinks-window-softcap": {
        "head_size": 128,
        "group": 16,
        "kv_heads": 1,
        "sinks": True,
        "sliding_window": 70,
        "softcap": 3.0,
        "query_lens": (3, 0, 1, 2, 4),
        "seq_lens": (3, 20, 330, 1000, 2000),
    },
    "group-16-nhd": {"head_size": 128, "group": 16, "order": "NHD", **_LENGTHS},
    "nhd": {"head_size": 128, "order": "NHD", **_LENGTHS},
    "nhd-d64-page-32": {"head_size": 64, "order": "NHD", "block_size": 32, **_LENGTHS},
    "page-48": {"head_size": 128, "block_size": 48, **_LENGTHS},
    "float16": {"head_size": 128, "query_dtype": torch.float16, **_LENGTHS},
    "four-over-six": {"head_size": 128, "k_dtype": "nvfp4_4over6", **_LENGTHS},
    "sinks-window-softcap": {
        "head_size": 128,
        "sinks": True,
        "sliding_window": 20,
        "softcap": 3.0,
        **_LENGTHS,
    },
    "window-longer": {"head_size": 64, "sliding_window": 1000, "sinks": True, **_LENGTHS},
    "several-queries": {
        "head_size": 64,
        "group": 8,
        "query_lens": (4, 3, 0, 8, 1),
        "seq_lens": (100, 3, 50, 1000, 2),
    },
    "several-queries-window": {
        "head_size": 128,
        "sliding_window": 100,
        "query_lens": (2,) * 5,
        "seq_lens": (2, 50, 102, 1000, 3000),
    },
    "ragged": {
        "head_size": 128,
        "kv_heads": 1,
        "query_lens": (1,) * 20,
        "seq_lens": tuple(range(1, 4000, 200)),
    },
    "more-sequences-than-warps": {
        "head_size": 64,
        "kv_heads": 8,
        "group": 1,
        "query_lens": (1,) * 320,
        "seq_lens": tuple(1 + i % 40 for i in range(320)),
    },
    "fp8": {"k_dtype": "fp8_e4m3", "head_size": 128, **_LENGTHS},
    "fp8-e5m2-nhd": {"k_dtype": "fp8_e5m2", "head_size": 64, "order": "NHD", **_LENGTHS},
    "bfloat16": {"k_dtype": "bfloat16", "head_size": 128, **_LENGTHS},
    "bfloat16-d256-group-16": {
        "k_dtype": "bfloat16",
        "head_size": 256,
        "group": 16,
        "kv_heads": 1,
        "block_size": 64,
        **_LENGTHS,
    },
    "float16-cache": {
        "k_dtype": "float16",
        "head_size": 64,
        "query_dtype": torch.float16,
        "group": 8,
        **_LENGTHS,
    },
    "fp8-k-nvfp4-v": {"k_dtype": "fp8", "v_dtype": "nvfp4", "head_size": 128, **_LENGTHS},
    "nvfp4-k-bfloat16-v-nhd": {
        "k_dtype": "nvfp4",
        "v_dtype": "bfloat16",
        "head_size": 64,
        "head_size_v": 128,
        "order": "NHD",
        **_LENGTHS,
    },
    "fp8-several-queries-window": {
        "k_dtype": "fp8",
        "head_size": 128,
        "sliding_window": 100,
        "sinks": True,
        "query_lens": (4,) * 5,
        "seq_lens": (4, 50, 102, 1000, 3000),
    },
    "one-long-sequence": {
        "head_size": 128,
        "kv_heads": 1,
        "query_lens": (1,),
        "seq_lens": (9001,),
    },
}


RECENT_CASES: dict[str, dict[str, Any]] = {
    "d128": {"head_size": 128, **_LENGTHS},
    "lengths-around-it": {
        "head_size": 64,
        "query_lens": (1,) * 8,
        "seq_lens": (15, 16, 17, 63, 64, 65, 66, 129),
    },
    "several-queries": {
        "head_size": 64,
        "query_lens": (4, 3, 0, 8, 1, 16, 2),
        "seq_lens": (100, 3, 50, 1000, 2, 16, 65),
    },
    "prefill": {"head_size": 64, "query_lens": (150, 1, 70), "seq_lens": (150, 600, 1030)},
    "window": {
        "head_size": 128,
        "sliding_window": 100,
        "query_lens": (1, 1, 1, 30, 1),
        "seq_lens": (20, 101, 600, 141, 1),
    },
    "window-below": {
        "head_size": 64,
        "sliding_window": 40,
        "query_lens": (1, 3, 1, 30, 1),
        "seq_lens": (20, 101, 600, 141, 1),
    },
    "sinks-softcap": {"head_size": 64, "sinks": True, "softcap": 3.0, **_LENGTHS},
    "recipe": {"head_size": 64, "transform": {}, **_LENGTHS},
    "recipe-several-queries": {
        "head_size": 128,
        "transform": {},
        "sliding_window": 200,
        "query_lens": (4, 3, 8, 1, 70),
        "seq_lens": (66, 3, 1000, 64, 300),
    },
    "mqa-fp8-v": {"head_size": 64, "group": 32, "kv_heads": 1, "v_dtype": "fp8", **_LENGTHS},
    "float16": {"head_size": 64, "query_dtype": torch.float16, **_LENGTHS},
    "float32": {"head_size": 64, "query_dtype": torch.float32, **_LENGTHS},
}
"""Arguments of `make_case` for the last 64 tokens in rings."""
RECENT_CASES = {name: {"recent": 64, **case} for name, case in RECENT_CASES.items()}

_ALL: dict[str, Any] = {}
TRANSFORM_CASES: dict[str, dict[str, Any]] = {
    "d128": {"head_size": 128, **_LENGTHS},
    "d64-group-8": {"head_size": 64, "group": 8, **_LENGTHS},
    "d96": {"head_size": 96, **_LENGTHS},
    "d256": {"head_size": 256, **_LENGTHS},
    "mqa-32": {"head_size": 64, "group": 32, "kv_heads": 1, **_LENGTHS},
    "k64-v128-nhd": {"head_size": 64, "head_size_v": 128, "order": "NHD", **_LENGTHS},
    "page-48": {"head_size": 128, "block_size": 48, **_LENGTHS},
    "several-queries": {
        "head_size": 64,
        "query_lens": (4, 3, 0, 8, 1, 16),
        "seq_lens": (100, 3, 50, 1000, 2, 16),
    },
    "prefill": {"head_size": 64, "query_lens": (150, 1, 70), "seq_lens": (150, 600, 1030)},
    "window": {
        "head_size": 128,
        "sliding_window": 20,
        "query_lens": (1, 1, 1, 30, 1),
        "seq_lens": (20, 21, 600, 41, 1),
    },
    "sinks-softcap": {"head_size": 128, "sinks": True, "softcap": 3.0, **_LENGTHS},
    "long": {"head_size": 128, "kv_heads": 1, "query_lens": (1,), "seq_lens": (5000,)},
    "centred-alone": {"head_size": 64, "transform": {"rotate": False, "first_tokens": 0}},
    "rotated-alone": {"head_size": 64, "transform": {"center": False, "first_tokens": 0}},
    "first-token-alone": {"head_size": 64, "transform": {"center": False, "rotate": False}},
    "sm100": {"head_size": 64, "v_scale_layout": "sm100"},
    "float32": {"head_size": 64, "query_dtype": torch.float32, **_LENGTHS},
    "fp8-v": {"head_size": 64, "v_dtype": "fp8_e4m3", **_LENGTHS},
}
"""Options of `make_transform`; all are on by default."""
TRANSFORM_CASES = {
    name: {"k_dtype": "nvfp4_4over6", "transform": _ALL, **case}
    for name, case in TRANSFORM_CASES.items()
}
