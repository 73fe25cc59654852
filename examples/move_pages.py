"""Pages move as bytes: a sequence swaps out and in, and KV heads are distributed over ranks.

    python examples/move_pages.py

For engines with their own scheduler, on halfbyte's pool and block tables.
"""

import torch

from halfbyte.kvcache import (
    FullAttentionSpec,
    PagedKVPool,
    SequenceTables,
    SlidingWindowSpec,
    read_tokens,
    reshape_and_cache,
)

HEADS, HEAD_SIZE, TOKENS, SCALE = 4, 64, 100, 0.01


def main() -> PagedKVPool:
    """Returns the pool, after all moves."""
    # A hybrid model: two groups of layers, whose pages share one pool.
    full = FullAttentionSpec(16, HEADS, HEAD_SIZE, kv_cache_dtype="nvfp4")
    window = SlidingWindowSpec(16, HEADS, HEAD_SIZE, kv_cache_dtype="nvfp4", sliding_window=32)
    pool = PagedKVPool([full, full, window], num_pages=32)
    tables = SequenceTables(pool)
    tables.add("a")
    tables.append("a", TOKENS)
    key, value = torch.randn(2, TOKENS, HEADS, HEAD_SIZE)
    layout, slots = pool.layout(0), tables.slots("a", 0, TOKENS)
    reshape_and_cache(key, value, pool.layer_pages(0), slots, layout, SCALE, SCALE)
    before = read_tokens(pool.layer_pages(0), slots, layout, SCALE, SCALE)

    # Swap out: codes and scales of all layers leave together, and the pages are free.
    host = tables.move_out("a")
    print(f"swapped out: {host.data.nbytes:,} bytes, {tables.allocator.num_used} pages in use")
    tables.move_in("a", host)
    slots = tables.slots("a", 0, TOKENS)
    after = read_tokens(pool.layer_pages(0), slots, layout, SCALE, SCALE)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))

    # Two ranks get half of the heads each; the page numbers, and so the block tables, stay.
    pages = tables.pages_of_groups()
    ranks = [pool.shard(rank, 2, pages) for rank in range(2)]
    half, _ = read_tokens(ranks[1].layer_pages(0), slots, ranks[1].layout(0), SCALE, SCALE)
    assert torch.equal(half, before[0][:, HEADS // 2 :])
    together = PagedKVPool.from_shards(ranks, pages)
    print(f"two ranks: {ranks[0].num_bytes:,} bytes each, {pool.num_bytes:,} together")
    return together


if __name__ == "__main__":
    main()
