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
from typing import Any, NamedTuple

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


class AttentionLayer(NamedTuple):
    """A layer's pages, the step's tokens, and the other arguments of `paged_attention`."""

    pages: torch.Tensor
    new: NewTokens
    arguments: dict[str, Any]

    def store(self) -> None:
        """Store the step's tokens."""
        k_scale, v_scale = self.arguments["k_scale"], self.arguments["v_scale"]
        self.new.store(self.pages, LAYOUT, k_scale, v_scale, self.arguments.get("transform"))

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Attention to pages that have the step's tokens."""
        return paged_attention(query, self.pages, **self.arguments)

    def store_and_attend(self, query: torch.Tensor) -> torch.Tensor:
        """Both in one call."""
        return paged_attention(query, self.pages, **self.arguments, new=self.new)

    def with_tokens(self, key: torch.Tensor, value: torch.Tensor) -> "AttentionLayer":
        """The layer of a step with other K and V, `[batch, kv_heads, head_size]`."""
        arguments = dict(self.arguments)
        if recent := arguments.get("recent"):
            arguments["recent"] = recent._replace(key=key, value=value)
        return AttentionLayer(self.pages, self.new._replace(key=key, value=value), arguments)


def attention_layers(
    batch: int, context: int, recipe: str, device: torch.device
) -> list[AttentionLayer]:
    """The attention of a step's layers, with pages that are filled."""
    per_sequence = -(-context // BLOCK_SIZE)
    num_pages = batch * per_sequence
    tables = torch.randperm(num_pages, device=device).int().view(batch, per_sequence)
    scale = torch.tensor(0.002, device=device)
    slots = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    arguments: dict[str, Any] = {
        "layout": LAYOUT,
        "query_start_loc": torch.arange(batch + 1, device=device).int(),
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "block_tables": tables,
        "scale": HEAD_SIZE**-0.5,
        "k_scale": scale,
        "v_scale": scale,
        "plans": AttentionPlans(),
    }
    copies = min(_LAYERS, 1 + _BYTES // (num_pages * LAYOUT.page_bytes))
    every = torch.arange(num_pages * BLOCK_SIZE, device=device)
    pools = []
    for _ in range(copies):
        pages = torch.zeros(num_pages, LAYOUT.page_bytes, dtype=torch.uint8, device=device)
        for some in every.split(2**16):
            NewTokens(*random_kv(len(some), device), some).store(pages, LAYOUT, scale, scale)
        pools.append(pages)
    plain = NewTokens(*random_kv(batch, device), slots)
    layers = []
    for i in range(_LAYERS):
        new, changed = with_recipe(plain, context) if recipe == "balanced" else (plain, {})
        layers.append(AttentionLayer(pools[i % copies], new, {**arguments, **changed}))
    return layers


def ways(batch: int, context: int, recipe: str, device: torch.device) -> dict[str, list[Call]]:
    """Calls of a step's layers, by way."""
    query = torch.randn(batch, HEADS, HEAD_SIZE, device=device).bfloat16()
    calls: dict[str, list[Call]] = {"decode": [], "two calls": [], "one call": []}
    for layer in attention_layers(batch, context, recipe, device):
        read = partial(layer.attend, query)
        calls["decode"].append(read)
        calls["two calls"] += [layer.store, read]
        calls["one call"].append(partial(layer.store_and_attend, query))
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
