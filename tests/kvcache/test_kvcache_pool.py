"""`PagedKVPool`: bytes by page, layer and shard."""

from dataclasses import replace

import pytest
import torch

from halfbyte.kvcache import (
    FullAttentionSpec,
    PagedKVPool,
    SlidingWindowSpec,
    plan_kv_cache,
    read_tokens,
    reshape_and_cache,
)
from halfbyte.kvcache.specs import KVCacheSpec
from kvcache.page_arithmetic import sentinel

SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(4, 4, 64, 32, kv_cache_dtype="nvfp4"),
    SlidingWindowSpec(4, 8, 16, kv_cache_dtype="bfloat16", sliding_window=6),
    FullAttentionSpec(4, 4, 32, kv_cache_dtype="fp8", v_cache_dtype="mxfp4"),
]
# Without a byte between the layers, so that whole pages can be compared.
DENSE_SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(16, 4, 64, 32, kv_cache_dtype="nvfp4"),
    FullAttentionSpec(16, 8, 16, kv_cache_dtype="bfloat16"),
    FullAttentionSpec(16, 4, 32, kv_cache_dtype="fp8", v_cache_dtype="mxfp4"),
]


def random_pool(specs: list[KVCacheSpec]) -> PagedKVPool:
    pool = PagedKVPool(specs, 5)
    pool.buffer.copy_(sentinel(*pool.buffer.shape))
    return pool


def written_pool(specs: list[KVCacheSpec]) -> tuple[PagedKVPool, list[torch.Tensor]]:
    """Random tokens in two pages per group (no page serves two groups), and each layer's slots."""
    pool = PagedKVPool(specs, 5)
    all_slots = []
    for layer in range(len(specs)):
        layout = pool.layout(layer)
        group, _ = pool.plan.locate(layer)
        first = (1 + 2 * group) * layout.block_size
        slots = torch.arange(first, first + 2 * layout.block_size)
        key = torch.randn(len(slots), layout.num_kv_heads, layout.head_size)
        value = torch.randn(len(slots), layout.num_kv_heads, layout.head_size_v)
        reshape_and_cache(key, value, pool.layer_pages(layer), slots, layout, 0.01, 0.02)
        all_slots.append(slots)
    return pool, all_slots


def test_a_new_pool_is_zeroed_bytes_of_its_plan() -> None:
    plan = plan_kv_cache(SPECS)
    pool = PagedKVPool(plan, 6)
    assert pool.plan is plan
    assert pool.buffer.shape == (6, plan.page_bytes)
    assert pool.buffer.dtype == torch.uint8
    assert (pool.num_pages, pool.num_bytes) == (6, 6 * plan.page_bytes)
    assert pool.device == torch.device("cpu")
    assert not pool.buffer.any()


def test_pools_of_no_pages_are_refused() -> None:
    assert PagedKVPool(SPECS, 1).num_pages == 1
    with pytest.raises(ValueError, match="num_pages: expected at least 1, got 0"):
        PagedKVPool(SPECS, 0)


def test_a_pool_of_specs_plans_them() -> None:
    assert PagedKVPool(SPECS, 2).plan == plan_kv_cache(SPECS)


def test_layer_pages_are_views_of_the_layers_bytes() -> None:
    pool = random_pool(SPECS)
    for layer, spec in enumerate(SPECS):
        group, index = pool.plan.locate(layer)
        planned = pool.plan.groups[group]
        pages = pool.layer_pages(layer)
        assert pages.shape == (5, planned.specs[index].page_size_bytes)
        assert pages.stride() == (pool.plan.page_bytes, 1)
        assert pages.data_ptr() == pool.buffer.data_ptr() + planned.offsets[index]
        assert pool.layout(layer).num_kv_heads == spec.num_kv_heads
        assert pool.layout(layer).block_size == planned.block_size


def test_read_and_write_pages_move_whole_pages() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    data = pool.read_pages([3, 1])
    assert torch.equal(data, before[[3, 1]])
    pool.write_pages([2, 4], data)
    assert torch.equal(pool.buffer, before[[0, 1, 3, 3, 1]])
    pool.buffer.zero_()
    assert torch.equal(data, before[[3, 1]])


def test_copy_pages_touches_the_targets_alone() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    pool.copy_pages([1, 4], [3, 2])
    assert torch.equal(pool.buffer, before[[0, 1, 4, 1, 4]])


def test_nothing_moves_for_no_pages() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    pool.copy_pages([], [])
    assert pool.read_pages([]).shape == (0, pool.plan.page_bytes)
    pool.write_pages([], pool.read_pages([]))
    assert torch.equal(pool.buffer, before)


def test_write_pages_refuses_data_of_another_shape_or_dtype() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    size = pool.plan.page_bytes
    for data in (
        torch.zeros(1, size, dtype=torch.uint8),
        torch.zeros(2, size - 1, dtype=torch.uint8),
        torch.zeros(2, size),
    ):
        with pytest.raises(ValueError, match="data"):
            pool.write_pages([1, 2], data)
    assert torch.equal(pool.buffer, before)


def test_grow_keeps_contents_and_adds_zeros() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    pool.grow(9)
    assert pool.num_pages == 9
    assert torch.equal(pool.buffer[:5], before)
    assert not pool.buffer[5:].any()
    with pytest.raises(ValueError, match="shrink"):
        pool.grow(8)


def test_to_moves_the_pool_itself() -> None:
    pool = random_pool(SPECS)
    before = pool.buffer.clone()
    assert pool.to("cpu") is pool
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_from_shards_undoes_shard_byte_for_byte(world_size: int) -> None:
    pool = random_pool(DENSE_SPECS)
    before = pool.buffer.clone()
    shards = [pool.shard(rank, world_size) for rank in range(world_size)]
    assert all(shard.num_pages == pool.num_pages for shard in shards)
    assert all(shard.num_bytes * world_size == pool.num_bytes for shard in shards)
    for shard in shards:
        assert shard.buffer.data_ptr() != pool.buffer.data_ptr()
    together = PagedKVPool.from_shards(shards)
    assert together.plan == pool.plan
    assert torch.equal(together.buffer, before)
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one_group", "hybrid"])
def test_each_shard_reads_its_slice_of_heads(hybrid: bool, world_size: int) -> None:
    specs = SPECS if hybrid else DENSE_SPECS
    pool, slots = written_pool(specs)
    owned = pages_of_groups(pool, slots)
    shards = [pool.shard(rank, world_size, owned) for rank in range(world_size)]
    together = PagedKVPool.from_shards(shards, owned)
    for layer in range(len(specs)):
        layout = pool.layout(layer)
        k, v = read_tokens(pool.layer_pages(layer), slots[layer], layout, 0.01, 0.02)
        heads = layout.num_kv_heads // world_size
        for rank, shard in enumerate(shards):
            own = shard.layout(layer)
            assert own == replace(layout, num_kv_heads=heads)
            k_own, v_own = read_tokens(shard.layer_pages(layer), slots[layer], own, 0.01, 0.02)
            assert torch.equal(k_own, k[:, rank * heads : (rank + 1) * heads])
            assert torch.equal(v_own, v[:, rank * heads : (rank + 1) * heads])
        pages = together.layer_pages(layer)
        k_again, v_again = read_tokens(pages, slots[layer], layout, 0.01, 0.02)
        assert torch.equal(k_again, k)
        assert torch.equal(v_again, v)


def test_halves_of_halves_are_quarters() -> None:
    pool, _ = written_pool(DENSE_SPECS)
    halves = [pool.shard(rank, 2) for rank in range(2)]
    quarters = [half.shard(rank, 2) for half in halves for rank in range(2)]
    for rank, quarter in enumerate(quarters):
        assert torch.equal(quarter.buffer, pool.shard(rank, 4).buffer)
    assert torch.equal(PagedKVPool.from_shards(quarters).buffer, pool.buffer)


def test_from_shards_of_padded_layers_keeps_the_plan() -> None:
    spec = FullAttentionSpec(16, 2, 64, kv_cache_dtype="nvfp4", page_size_padded=8192)
    pool = PagedKVPool([spec, spec], 3)
    assert PagedKVPool.from_shards([pool.shard(0, 1)]).plan == pool.plan


def pages_of_groups(pool: PagedKVPool, slots: list[torch.Tensor]) -> list[list[int]]:
    """Per group, the pages that its layers' slots lie in."""
    return [
        sorted({int(slot) // group.block_size for layer in group.layers for slot in slots[layer]})
        for group in pool.plan.groups
    ]


def test_shard_refuses() -> None:
    pool = random_pool(SPECS)
    with pytest.raises(ValueError, match="4 KV heads cannot be divided by 3"):
        pool.shard(0, 3, [[1], [2]])
    with pytest.raises(ValueError, match="expected the pages of each of 2 groups"):
        pool.shard(0, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank"):
            pool.shard(rank, 2)


def test_from_shards_refuses_pools_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="shards"):
        PagedKVPool.from_shards([])
    with pytest.raises(ValueError, match="plan"):
        PagedKVPool.from_shards([PagedKVPool(SPECS, 3), PagedKVPool(SPECS[:1], 3)])
    with pytest.raises(ValueError, match="number of pages"):
        PagedKVPool.from_shards([PagedKVPool(SPECS, 3), PagedKVPool(SPECS, 4)])
