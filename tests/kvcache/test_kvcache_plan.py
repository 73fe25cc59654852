"""Hybrid groups: which layers share pages, their offsets, and the padding."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.kvcache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    KVCacheSpec,
    PagedKVPool,
    SlidingWindowSpec,
    plan_kv_cache,
)


def gpt_oss(window_dtype: str = "nvfp4") -> list[KVCacheSpec]:
    """Window and full attention alternate; head size 64."""
    return [
        SlidingWindowSpec(16, 8, 64, kv_cache_dtype=window_dtype, sliding_window=128)
        if layer % 2 == 0
        else FullAttentionSpec(16, 8, 64, kv_cache_dtype="nvfp4")
        for layer in range(24)
    ]


def gemma3(window_dtype: str = "nvfp4") -> list[KVCacheSpec]:
    """Five windows to one full attention."""
    return [
        FullAttentionSpec(16, 4, 256, kv_cache_dtype="nvfp4")
        if layer % 6 == 5
        else SlidingWindowSpec(16, 4, 256, kv_cache_dtype=window_dtype, sliding_window=512)
        for layer in range(26)
    ]


def mixed_formats() -> list[KVCacheSpec]:
    """Formats differ within a group, K and V within a layer, heads between layers."""
    return [
        FullAttentionSpec(16, 2, 64, kv_cache_dtype="bfloat16"),
        SlidingWindowSpec(16, 3, 48, kv_cache_dtype="nvfp4", sliding_window=40),
        FullAttentionSpec(16, 1, 192, 128, kv_cache_dtype="fp8", v_cache_dtype="nvfp4"),
        FullAttentionSpec(16, 2, 64, kv_cache_dtype="mxfp4"),
        SlidingWindowSpec(16, 1, 80, 32, kv_cache_dtype="fp8_e5m2", sliding_window=40),
    ]


def three_lifetimes() -> list[KVCacheSpec]:
    return [
        FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4"),
        SlidingWindowSpec(16, 2, 64, kv_cache_dtype="nvfp4", sliding_window=64),
        ChunkedLocalAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", attention_chunk_size=64),
        SlidingWindowSpec(16, 2, 64, kv_cache_dtype="nvfp4", sliding_window=65),
        FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4"),
    ]


MODELS = {
    "gpt_oss": gpt_oss(),
    "gemma3": gemma3(),
    "gpt_oss_bfloat16_windows": gpt_oss("bfloat16"),
    "gemma3_bfloat16_windows": gemma3("bfloat16"),
    "mixed_formats": mixed_formats(),
    "three_lifetimes": three_lifetimes(),
    "one_layer": [FullAttentionSpec(16, 1, 16, kv_cache_dtype="nvfp4")],
}
each_model = pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS.keys())
each_unify = pytest.mark.parametrize("unify", ["block_size", "padding"])


def lifetime(spec: KVCacheSpec) -> tuple[int, ...]:
    """First needed tokens for any length: layers in which all agree form a group."""
    return tuple(spec.first_needed_token(n) for n in range(1200))


def check_plan(plan: KVCachePlan, specs: Sequence[KVCacheSpec]) -> None:
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(
        range(len(specs))
    )
    assert plan.num_layers == len(specs)
    assert plan.page_bytes % 16 == 0
    for group in plan.groups:
        assert len({lifetime(spec) for spec in group.specs}) == 1
        assert {spec.block_size for spec in group.specs} == {group.block_size}
        assert list(group.layers) == sorted(group.layers)
        end = 0
        for layer, spec, offset in zip(group.layers, group.specs, group.offsets, strict=True):
            original = specs[layer]
            assert type(spec) is type(original)
            assert spec.layout.k_dtype == original.layout.k_dtype
            assert spec.layout.v_dtype == original.layout.v_dtype
            assert spec.num_kv_heads == original.num_kv_heads
            assert spec.block_size % original.block_size == 0
            assert spec.block_size <= max(256, original.block_size)
            assert offset % 16 == 0
            assert end <= offset < end + 16
            end = offset + spec.page_size_bytes
        assert end <= group.content_bytes <= plan.page_bytes
    assert max(group.content_bytes for group in plan.groups) == plan.page_bytes


@each_model
@each_unify
def test_plan_places_every_layer_once_aligned_and_side_by_side(
    specs: list[KVCacheSpec], unify: str
) -> None:
    check_plan(plan_kv_cache(specs, unify=unify), specs)


@each_model
@each_unify
def test_locate_finds_each_layer(specs: list[KVCacheSpec], unify: str) -> None:
    plan = plan_kv_cache(specs, unify=unify)
    for layer in range(len(specs)):
        group, index = plan.locate(layer)
        assert plan.groups[group].layers[index] == layer
    for layer in (-1, len(specs)):
        with pytest.raises(ValueError, match="layer"):
            plan.locate(layer)


@each_model
@each_unify
def test_waste_is_the_share_of_bytes_that_hold_no_layer(
    specs: list[KVCacheSpec], unify: str
) -> None:
    plan = plan_kv_cache(specs, unify=unify)
    for group, waste in zip(plan.groups, plan.waste, strict=True):
        content = sum(spec.real_page_size_bytes for spec in group.specs)
        assert waste == pytest.approx(1 - content / plan.page_bytes, abs=1e-12)


@each_model
@each_unify
def test_bytes_per_token_of_the_plan(specs: list[KVCacheSpec], unify: str) -> None:
    plan = plan_kv_cache(specs, unify=unify)
    expected = sum(plan.page_bytes / group.block_size for group in plan.groups)
    assert plan.bytes_per_token == pytest.approx(expected)


@each_model
def test_padding_keeps_block_sizes(specs: list[KVCacheSpec]) -> None:
    plan = plan_kv_cache(specs, unify="padding")
    for group in plan.groups:
        assert group.specs == tuple(specs[layer] for layer in group.layers)


def test_gpt_oss_shares_pages_without_waste() -> None:
    plan = plan_kv_cache(gpt_oss())
    assert [group.layers for group in plan.groups] == [
        tuple(range(0, 24, 2)),
        tuple(range(1, 24, 2)),
    ]
    assert plan.page_bytes == 12 * 2 * 16 * 8 * 36
    assert plan.waste == (0.0, 0.0)
    assert [group.block_size for group in plan.groups] == [16, 16]


def test_gemma3_gives_full_attention_longer_pages() -> None:
    plan = plan_kv_cache(gemma3())
    assert [len(group.layers) for group in plan.groups] == [22, 4]
    assert [group.block_size for group in plan.groups] == [32, 176]
    assert plan.waste == (0.0, 0.0)
    padded = plan_kv_cache(gemma3(), unify="padding")
    assert padded.waste == pytest.approx((0.0, 9 / 11))


def test_bfloat16_windows_beside_nvfp4_layers_waste_little() -> None:
    specs = gpt_oss("bfloat16")
    plan = plan_kv_cache(specs)
    check_plan(plan, specs)
    window, full = plan.groups
    assert {spec.layout.k_dtype.value for spec in window.specs} == {"bfloat16"}
    assert {spec.layout.k_dtype.value for spec in full.specs} == {"nvfp4"}
    assert (window.block_size, full.block_size) == (32, 112)
    assert plan.waste == pytest.approx((0.0, 1 / 64))


def test_windows_of_different_lengths_are_different_groups() -> None:
    plan = plan_kv_cache(three_lifetimes())
    assert [group.layers for group in plan.groups] == [(0, 4), (1,), (2,), (3,)]


def test_different_block_sizes_are_different_groups() -> None:
    specs = [FullAttentionSpec(16, 2, 64), FullAttentionSpec(32, 2, 64)]
    assert [group.layers for group in plan_kv_cache(specs).groups] == [(0,), (1,)]


@pytest.mark.parametrize("unify", ["block_size", "padding"])
def test_padded_specs_take_their_padded_size(unify: str) -> None:
    spec = FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", page_size_padded=4096)
    plan = plan_kv_cache([spec, spec], unify=unify)
    assert plan.groups[0].offsets == (0, 4096)
    assert plan.page_bytes == 8192


def test_padding_of_padded_specs_counts_as_waste() -> None:
    spec = FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", page_size_padded=4608)
    assert spec.real_page_size_bytes == 2304
    assert plan_kv_cache([spec]).waste == (0.5,)


def test_alignment_between_layers_counts_as_waste() -> None:
    spec = FullAttentionSpec(1, 1, 16, kv_cache_dtype="nvfp4")
    plan = plan_kv_cache([spec, spec])
    assert (spec.real_page_size_bytes, plan.page_bytes) == (18, 64)
    assert plan.waste == pytest.approx((1 - 36 / 64,))


def best_by_brute_force(specs: Sequence[KVCacheSpec]) -> tuple[float, int]:
    """`(waste, page_bytes)` of the plan that the docstring promises, over all block sizes."""
    groups = plan_kv_cache(specs, unify="padding").groups
    choices = [
        [group.with_block_size(group.block_size * n) for n in range(1, 256 // group.block_size + 1)]
        for group in groups
    ]
    best = None
    for chosen in product(*choices):
        sizes = [group.content_bytes for group in chosen]
        waste = 1 - min(sizes) / max(sizes)
        key = (max(waste, 0.05), max(sizes))
        best = key if best is None or key < best else best
    assert best is not None
    return best


formats = st.sampled_from(["nvfp4", "fp8", "bfloat16", "mxfp4"])


@st.composite
def hybrid_models(draw: st.DrawFn) -> list[KVCacheSpec]:
    specs: list[KVCacheSpec] = []
    for window in (None, 64, 100)[: draw(st.integers(2, 3))]:
        block_size, heads = draw(st.sampled_from((16, 32))), draw(st.integers(1, 4))
        head_size, dtype = draw(st.sampled_from([64, 96, 256])), draw(formats)
        for _ in range(draw(st.integers(1, 5))):
            specs.append(
                FullAttentionSpec(block_size, heads, head_size, kv_cache_dtype=dtype)
                if window is None
                else SlidingWindowSpec(
                    block_size, heads, head_size, kv_cache_dtype=dtype, sliding_window=window
                )
            )
    return specs


@settings(max_examples=20, deadline=None, derandomize=True)
@given(hybrid_models())
def test_block_sizes_are_the_best_that_brute_force_finds(specs: list[KVCacheSpec]) -> None:
    plan = plan_kv_cache(specs)
    check_plan(plan, specs)
    waste, page_bytes = best_by_brute_force(specs)
    assert (max(*plan.waste, 0.05), plan.page_bytes) == (pytest.approx(waste), page_bytes)


def test_block_sizes_are_the_best_for_padded_specs() -> None:
    padded = FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", page_size_padded=4096)
    window = SlidingWindowSpec(16, 4, 64, kv_cache_dtype="nvfp4", sliding_window=64)
    waste, page_bytes = best_by_brute_force([padded, window])
    plan = plan_kv_cache([padded, window])
    sizes = [group.content_bytes for group in plan.groups]
    assert max(1 - min(sizes) / max(sizes), 0.05) == pytest.approx(waste)
    assert plan.page_bytes == page_bytes


def test_group_num_dead_pages_is_its_specs() -> None:
    group = KVCacheGroup.of([3], [SlidingWindowSpec(4, 1, 16, sliding_window=5)])
    assert [group.num_dead_pages(n) for n in (0, 7, 8, 11, 12)] == [0, 0, 1, 1, 2]


def test_layers_of_a_pool_do_not_overlap() -> None:
    pool = PagedKVPool(mixed_formats(), num_pages=2)
    for group in pool.plan.groups:
        covered = torch.zeros(pool.plan.page_bytes, dtype=torch.int)
        for layer, offset in zip(group.layers, group.offsets, strict=True):
            pages = pool.layer_pages(layer)
            assert pages.data_ptr() == pool.buffer.data_ptr() + offset
            covered[offset : offset + pool.layout(layer).page_bytes] += 1
        assert int(covered.max()) == 1


def test_plan_refuses() -> None:
    with pytest.raises(ValueError, match="specs"):
        plan_kv_cache([])
    with pytest.raises(ValueError, match="unify"):
        plan_kv_cache(gpt_oss(), unify="pad")
