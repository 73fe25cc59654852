"""Storing a step's tokens and decode attention, in two calls or in one, on one GPU.

    python -m benchmarks.store_and_decode [--out benchmarks/results/store_and_decode.json]

In one call (`paged_attention(new=...)`) the decode kernel reads older pages of `balanced` while the
tokens are stored. Eight layers in a CUDA graph, as in `benchmarks.chains`; heads and recipes of
`benchmarks.recipe_speed`. Pages rotate over copies that together exceed the caches; a layer has
rings, means and angles of its own. µs per layer, medians of replays in turns; `decode` is attention
alone.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layers import Times, measure, medians_in_turns
from benchmarks.recipe_speed import (
    BLOCK_SIZE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYOUT,
    RECENT,
    make_transform,
    random_kv,
)
from benchmarks.timing import capture
from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.kvcache import NewTokens
from halfbyte.kvcache.recent import SLACK, RecentInputs, RingSlots
from halfbyte.measure.timing import Call

RESULT = Path(__file__).parent / "results" / "store_and_decode.json"
CASES = ((64, 8192), (128, 2048), (16, 1024), (1, 4096), (1, 131072))
RECIPES = ("plain", "balanced")
_LAYERS = 8
_BYTES = 600 * 2**20
"""Of all copies of the pages, at least: they exceed the caches."""
_ROUNDS = 15


def ways(batch: int, context: int, recipe: str, device: torch.device) -> dict[str, list[Call]]:
    """Calls of a step's layers, by way."""
    per_sequence = -(-context // BLOCK_SIZE)
    num_pages = batch * per_sequence
    tables = torch.randperm(num_pages, device=device).int().view(batch, per_sequence)
    scale = torch.tensor(0.002, device=device)
    slots = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    attend = partial(
        paged_attention,
        torch.randn(batch, HEADS, HEAD_SIZE, device=device).bfloat16(),
        layout=LAYOUT,
        query_start_loc=torch.arange(batch + 1, device=device).int(),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        scale=HEAD_SIZE**-0.5,
        k_scale=scale,
        v_scale=scale,
        plans=AttentionPlans(),
    )
    copies = min(_LAYERS, 1 + _BYTES // (num_pages * LAYOUT.page_bytes))
    calls: dict[str, list[Call]] = {"decode": [], "two calls": [], "one call": []}
    every = torch.arange(num_pages * BLOCK_SIZE, device=device)
    pools = []
    for _ in range(copies):
        pages = torch.zeros(num_pages, LAYOUT.page_bytes, dtype=torch.uint8, device=device)
        for some in every.split(2**16):
            NewTokens(*random_kv(len(some), device), some).store(pages, LAYOUT, scale, scale)
        pools.append(pages)
    plain = NewTokens(*random_kv(batch, device), slots)
    for i in range(_LAYERS):
        pages = pools[i % copies]
        new, changed = with_recipe(plain, context) if recipe == "balanced" else (plain, {})
        store = partial(new.store, pages, LAYOUT, scale, scale, changed.get("transform"))
        read = partial(attend, pages, **changed)
        calls["decode"].append(read)
        calls["two calls"] += [store, read]
        calls["one call"].append(partial(read, new=new))
    return calls


def with_recipe(new: NewTokens, context: int) -> tuple[NewTokens, dict[str, Any]]:
    """A layer of `balanced`: new tokens with positions and rings, arguments of attention."""
    batch, device = len(new.key), new.key.device
    ring = torch.randn(2, batch, KV_HEADS, RECENT + SLACK, HEAD_SIZE, device=device)
    keys, values = ring.bfloat16()
    rows = torch.arange(batch, device=device)
    places = torch.full_like(rows, (context - 1) % (RECENT + SLACK))
    new = new._replace(
        positions=torch.full_like(rows, context - 1),
        recent=RingSlots(keys, values, rows, rows, places),
    )
    recent = RecentInputs(RECENT, keys, values, rows.int(), new.key, new.value)
    return new, {"transform": make_transform(context, device), "recent": recent}


def microseconds(calls: dict[str, list[Call]]) -> Times:
    """Per layer, by way."""
    for way in calls.values():
        for call in way:
            call()  # compiles kernels, and makes the plan that the layers share
    graphs = {name: capture(way) for name, way in calls.items()}
    return medians_in_turns(graphs, _ROUNDS, _LAYERS)


def measured(device: torch.device) -> Iterator[tuple[str, Times]]:
    """Times of each recipe and size."""
    for batch, context in CASES:
        for recipe in RECIPES:
            times = microseconds(ways(batch, context, recipe, device))
            yield f"{recipe}, {batch} x {context}", times


if __name__ == "__main__":
    measure(__doc__, RESULT, measured)
