"""Specs: bytes of a page for every format and attention, and which tokens stay alive."""

from collections.abc import Callable

import pytest
import torch

from halfbyte.kvcache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheDType,
    KVCacheSpec,
    PagedKVPool,
    SequenceTables,
    SlidingWindowSpec,
)
from kvcache.page_arithmetic import ALIASES, DTYPES, UNQUANTIZED, head_bytes

SpecMaker = Callable[..., KVCacheSpec]


def full(*args: object, **keywords: object) -> KVCacheSpec:
    return FullAttentionSpec(*args, **keywords)  # type: ignore[arg-type]


def sliding(*args: object, **keywords: object) -> KVCacheSpec:
    return SlidingWindowSpec(*args, **{"sliding_window": 100, **keywords})  # type: ignore[arg-type]


def chunked(*args: object, **keywords: object) -> KVCacheSpec:
    keywords = {"attention_chunk_size": 100, **keywords}
    return ChunkedLocalAttentionSpec(*args, **keywords)  # type: ignore[arg-type]


each_attention = pytest.mark.parametrize("make", [full, sliding, chunked])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_attention
@each_dtype
def test_page_bytes(make: SpecMaker, dtype: str) -> None:
    spec = make(16, 4, 64, kv_cache_dtype=dtype)
    assert spec.real_page_size_bytes == 2 * 16 * 4 * head_bytes(dtype, 64)
    assert spec.page_size_bytes == spec.real_page_size_bytes
    assert spec.layout.page_bytes == spec.real_page_size_bytes


@each_attention
@each_dtype
def test_page_bytes_with_another_head_size_of_v(make: SpecMaker, dtype: str) -> None:
    spec = make(8, 3, 192, head_size_v=128, kv_cache_dtype=dtype)
    expected = 8 * 3 * (head_bytes(dtype, 192) + head_bytes(dtype, 128))
    assert spec.real_page_size_bytes == expected


@each_attention
@each_dtype
@pytest.mark.parametrize("v_dtype", DTYPES)
def test_page_bytes_with_another_format_of_v(make: SpecMaker, dtype: str, v_dtype: str) -> None:
    spec = make(16, 2, 64, head_size_v=32, kv_cache_dtype=dtype, v_cache_dtype=v_dtype)
    expected = 16 * 2 * (head_bytes(dtype, 64) + head_bytes(v_dtype, 32))
    assert spec.real_page_size_bytes == expected
    assert (spec.layout.k_dtype.value, spec.layout.v_dtype.value) == (dtype, v_dtype)


@each_attention
def test_nvfp4_page_is_nine_thirtyseconds_of_a_bfloat16_page(make: SpecMaker) -> None:
    nvfp4 = make(16, 8, 128, kv_cache_dtype="nvfp4").page_size_bytes
    assert nvfp4 * 32 == make(16, 8, 128, kv_cache_dtype="bfloat16").page_size_bytes * 9


@each_attention
@pytest.mark.parametrize(("alias", "dtype"), ALIASES.items())
def test_aliases_name_the_same_layout(make: SpecMaker, alias: str, dtype: str) -> None:
    by_name = make(16, 2, 64, kv_cache_dtype=dtype)
    assert make(16, 2, 64, kv_cache_dtype=alias).layout == by_name.layout
    assert make(16, 2, 64, kv_cache_dtype=KVCacheDType(dtype)).layout == by_name.layout


@each_attention
@pytest.mark.parametrize(("name", "model_dtype"), UNQUANTIZED.items(), ids=str)
def test_auto_is_the_models_dtype(make: SpecMaker, name: str, model_dtype: torch.dtype) -> None:
    spec = make(16, 2, 24, kv_cache_dtype="auto", dtype=model_dtype)
    assert spec.layout.k_dtype.value == spec.layout.v_dtype.value == name
    assert spec.real_page_size_bytes == 2 * 16 * 2 * 24 * model_dtype.itemsize


def test_auto_is_the_default_and_bfloat16_the_default_dtype() -> None:
    assert FullAttentionSpec(16, 2, 24).layout.k_dtype == KVCacheDType.BFLOAT16


@pytest.mark.parametrize("v_dtype", ["auto", "bfloat16"])
def test_auto_v_is_the_models_dtype_beside_a_quantized_k(v_dtype: str) -> None:
    spec = FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", v_cache_dtype=v_dtype)
    assert spec.layout.k_dtype == KVCacheDType.NVFP4
    assert spec.layout.v_dtype == KVCacheDType.BFLOAT16


@each_attention
@pytest.mark.parametrize("model_dtype", UNQUANTIZED.values(), ids=str)
@pytest.mark.parametrize("name", UNQUANTIZED)
def test_explicit_unquantized_format_wins_over_the_models_dtype(
    make: SpecMaker, name: str, model_dtype: torch.dtype
) -> None:
    spec = make(16, 2, 24, kv_cache_dtype=name, dtype=model_dtype)
    assert spec.layout.k_dtype.storage_dtype == UNQUANTIZED[name]
    assert spec.real_page_size_bytes == 2 * 16 * 2 * 24 * UNQUANTIZED[name].itemsize


@each_attention
def test_padding_counts_in_the_page_and_not_in_the_content(make: SpecMaker) -> None:
    spec = make(16, 4, 64, kv_cache_dtype="nvfp4", page_size_padded=8192)
    assert (spec.real_page_size_bytes, spec.page_size_bytes) == (4608, 8192)
    exact = make(16, 4, 64, kv_cache_dtype="nvfp4", page_size_padded=4608)
    assert exact.page_size_bytes == 4608


@each_attention
def test_other_block_sizes_and_heads_keep_all_but_the_padding(make: SpecMaker) -> None:
    spec = make(
        16, 4, 64, 32, kv_cache_dtype="fp8", v_cache_dtype="nvfp4", page_size_padded=1 << 16
    )
    per_token_and_head = 64 + head_bytes("nvfp4", 32)
    assert type(spec.with_block_size(48)) is type(spec)
    assert spec.with_block_size(48).page_size_bytes == 48 * 4 * per_token_and_head
    assert spec.with_num_kv_heads(2).page_size_bytes == 16 * 2 * per_token_and_head
    for token in (0, 99, 100, 101, 250):
        assert spec.with_block_size(48).first_needed_token(token) == spec.first_needed_token(token)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        pytest.param({"page_size_padded": 4607}, "page_size_padded", id="padded_below_content"),
        pytest.param({"page_size_padded": 0}, "page_size_padded", id="padded_to_zero"),
        pytest.param({"block_size": 0}, "block_size", id="block_size"),
        pytest.param({"num_kv_heads": -1}, "num_kv_heads", id="num_kv_heads"),
        pytest.param({"head_size": 72}, "head_size", id="head_size"),
        pytest.param({"head_size": 0}, "head_size", id="no_head_size"),
        pytest.param({"head_size_v": 40}, "head_size_v", id="head_size_v"),
        pytest.param({"head_size_v": 0}, "head_size_v", id="no_head_size_v"),
        pytest.param({"kv_cache_dtype": "mxfp4", "head_size": 48}, "head_size", id="mxfp4"),
        pytest.param({"kv_cache_dtype": "fp4"}, "nvfp4_4over6", id="unknown_dtype"),
        pytest.param({"v_cache_dtype": "int8"}, "nvfp4_4over6", id="unknown_v_dtype"),
        pytest.param({"kv_cache_dtype": "auto", "dtype": torch.int8}, "int8", id="model_dtype"),
    ],
)
@each_attention
def test_spec_refuses(make: SpecMaker, keywords: dict[str, object], message: str) -> None:
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "kv_cache_dtype": "nvfp4"}
    with pytest.raises(ValueError, match=message):
        make(**{**fields, **keywords})


@pytest.mark.parametrize("size", [0, -1])
def test_windows_and_chunks_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="sliding_window"):
        SlidingWindowSpec(16, 4, 64, sliding_window=size)
    with pytest.raises(ValueError, match="attention_chunk_size"):
        ChunkedLocalAttentionSpec(16, 4, 64, attention_chunk_size=size)


def attends(spec: KVCacheSpec, q: int, k: int) -> bool:
    """Whether query q attends to key k, as the specification says it."""
    if isinstance(spec, SlidingWindowSpec):
        return k <= q and q - k < spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return k <= q and k // spec.attention_chunk_size == q // spec.attention_chunk_size
    return k <= q


LIFETIMES = [
    FullAttentionSpec(4, 1, 16),
    *(SlidingWindowSpec(4, 1, 16, sliding_window=w) for w in (1, 2, 3, 4, 5, 7, 8, 9)),
    SlidingWindowSpec(1, 1, 16, sliding_window=3),
    SlidingWindowSpec(3, 1, 16, sliding_window=100),
    *(ChunkedLocalAttentionSpec(4, 1, 16, attention_chunk_size=c) for c in (1, 3, 4, 6, 8, 10)),
    ChunkedLocalAttentionSpec(3, 1, 16, attention_chunk_size=100),
]


def lifetime_id(spec: KVCacheSpec) -> str:
    if isinstance(spec, SlidingWindowSpec):
        return f"window_{spec.sliding_window}_pages_of_{spec.block_size}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"chunk_{spec.attention_chunk_size}_pages_of_{spec.block_size}"
    return "full"


each_lifetime = pytest.mark.parametrize("spec", LIFETIMES, ids=lifetime_id)
HORIZON = 40


def needed_from(spec: KVCacheSpec, computed: int) -> list[int]:
    """Keys below HORIZON that some query from `computed` on attends to."""
    later = range(computed, HORIZON)
    return [k for k in range(HORIZON) if any(attends(spec, q, k) for q in later)]


@each_lifetime
def test_first_needed_token_is_the_oldest_of_later_queries(spec: KVCacheSpec) -> None:
    for computed in range(HORIZON):
        assert spec.first_needed_token(computed) == min(needed_from(spec, computed))


@each_lifetime
def test_num_dead_pages_counts_pages_that_no_later_query_reads(spec: KVCacheSpec) -> None:
    for computed in range(HORIZON):
        live = {k // spec.block_size for k in needed_from(spec, computed)}
        assert spec.num_dead_pages(computed) == min(live)


def max_live_pages(spec: KVCacheSpec, num_tokens: int, max_chunk: int) -> int:
    """Over every chunk that may be computed: pages from the oldest key it reads to its last."""
    most = 0
    for computed in range(num_tokens):
        oldest = next(k for k in range(computed + 1) if attends(spec, computed, k))
        last = min(computed + max_chunk, num_tokens) - 1
        most = max(most, last // spec.block_size - oldest // spec.block_size + 1)
    return most


@each_lifetime
def test_max_live_pages_suffices_and_wastes_at_most_one(spec: KVCacheSpec) -> None:
    for num_tokens in (1, 5, 8, 30):
        for max_chunk in (1, 2, 4, 7, 64):
            needed = max_live_pages(spec, num_tokens, max_chunk)
            assert needed <= spec.max_live_pages(num_tokens, max_chunk) <= needed + 1


@each_lifetime
@pytest.mark.parametrize("max_chunk", [1, 4, 7])
def test_sequence_tables_never_hold_more_than_max_live_pages(
    spec: KVCacheSpec, max_chunk: int
) -> None:
    tables = SequenceTables(PagedKVPool([spec], num_pages=HORIZON + 1))
    tables.add("a")
    for first_chunk in range(1, max_chunk + 1):
        computed, count = 0, first_chunk
        while computed + count <= 30:
            tables.release_dead_pages("a", computed)
            tables.append("a", count)
            assert tables.allocator.num_used <= spec.max_live_pages(30, max_chunk)
            computed, count = computed + count, max_chunk
        tables.crop("a", 0)


@pytest.mark.parametrize("max_chunk", [1, 64])
def test_max_live_pages_of_no_tokens_is_zero(max_chunk: int) -> None:
    for spec in LIFETIMES:
        assert spec.max_live_pages(0, max_chunk) == 0
