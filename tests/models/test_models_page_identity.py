"""Pools accept only pages of the same layouts, scales, recipe and calibration."""

from dataclasses import replace
from typing import Any

import pytest

from halfbyte.kvcache import FullAttentionSpec, KVScales, PagedKVPool
from halfbyte.kvcache.sequences import SequenceTables
from halfbyte.models import Cache, KVQuantization
from models.zoo import make_model, token_ids

SCALES = KVScales((9.0, 9.0), (9.0, 9.0), "test")


def pool(scales: KVScales | None = SCALES, dtype: str = "nvfp4", heads: int = 2) -> PagedKVPool:
    spec = FullAttentionSpec(16, heads, 32, kv_cache_dtype=dtype)
    pool = PagedKVPool([spec, spec], 4)
    KVQuantization.of(pool, scales)
    return pool


def test_a_sequence_moves_between_equal_pools_alone() -> None:
    tables = SequenceTables(pool())
    tables.add("a")
    tables.append("a", 20)
    host = tables.move_out("a")
    assert host.identity == tables.pool.identity
    other = SequenceTables(pool(KVScales((36.0, 36.0), (36.0, 36.0), "test")))
    with pytest.raises(ValueError, match="other scales or another recipe"):
        other.move_in("a", host)
    assert len(other) == 0
    assert other.allocator.num_used == 0
    same = SequenceTables(pool(replace(SCALES, source="the same from elsewhere")))
    same.move_in("a", host)
    assert same.length("a") == 20


def test_a_recipe_and_its_calibration_count() -> None:
    model: Any = make_model("llama")
    caches = [Cache(model, "nvfp4", kv_recipe=recipe) for recipe in ("plain", "balanced")]
    assert caches[0].kv_scales is not None
    assert caches[1].kv_scales == caches[0].kv_scales
    for cache in caches:
        model(token_ids(1, 20), past_key_values=cache, use_cache=True)
    assert caches[0].pool.identity != caches[1].pool.identity
    moved = caches[0].tables.move_out(0)
    with pytest.raises(ValueError, match=r"another (plan|recipe)"):
        caches[1].tables.move_in("a", moved)
    caches[0].tables.move_in("a", moved)


def test_shards_keep_it() -> None:
    whole = pool()
    shards = [whole.shard(rank, 2) for rank in range(2)]
    assert PagedKVPool.from_shards(shards).identity == whole.identity
    shards[1] = pool(KVScales((36.0,) * 2, (36.0,) * 2, "test"), heads=1)
    with pytest.raises(ValueError, match="the same scales and recipe"):
        PagedKVPool.from_shards(shards)


def test_a_pool_has_one() -> None:
    filled = pool()
    KVQuantization.of(filled, SCALES)
    with pytest.raises(ValueError, match="has pages of other scales"):
        KVQuantization.of(filled, KVScales((1.0, 1.0), (1.0, 1.0), "test"))
    formats = {pool(None if x == "bfloat16" else SCALES, x).identity for x in ("nvfp4", "bfloat16")}
    assert len(formats) == 2
