"""Hybrid models on one pool: layers that need the same tokens form a group.

A page of the pool belongs to one group at a time and holds `block_size` tokens of *all* its layers,
side by side. Layers with full attention, with a window of 128 and with another window are three
groups. Groups share one pool, so all pages have one size: each group uses a multiple of its block
size (with fewer or smaller layers a page holds more tokens), and the rest of a page is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfbyte.kvcache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

ALIGNMENT = 16
"""Layers start at multiples of this many bytes, so that kernels can load 16 bytes at a time."""
MAX_BLOCK_SIZE = 256
_ACCEPTABLE_WASTE = 0.05


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables.

    Args:
        layers: indices of the layers.
        specs: their specs, all of one block size.
        offsets: byte in the page where each layer starts.
        extent: bytes of a page from its start to the end of the last layer.
    """

    layers: tuple[int, ...]
    specs: tuple[KVCacheSpec, ...]
    offsets: tuple[int, ...]
    extent: int

    @property
    def content_bytes(self) -> int:
        """Bytes of a page that hold K, V and scales; the rest is padding."""
        return sum(spec.real_page_size_bytes for spec in self.specs)

    @classmethod
    def of(cls, layers: Sequence[int], specs: Sequence[KVCacheSpec]) -> "KVCacheGroup":
        """Lay the layers of a group side by side."""
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.page_size_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(layers), tuple(specs), tuple(offsets), end)

    def with_block_size(self, block_size: int) -> "KVCacheGroup":
        """The same layers with pages of another number of tokens."""
        return self.of(self.layers, [spec.with_block_size(block_size) for spec in self.specs])

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.specs[0].block_size

    def num_dead_pages(self, num_computed_tokens: int) -> int:
        """Leading pages of a sequence that no layer of the group will read again."""
        return self.specs[0].num_dead_pages(num_computed_tokens)


@dataclass(frozen=True)
class KVCachePlan:
    """Groups that share one pool of pages of `page_bytes`."""

    groups: tuple[KVCacheGroup, ...]
    page_bytes: int

    @property
    def waste(self) -> tuple[float, ...]:
        """Per group, the share of its pages that is padding."""
        return tuple(1 - group.content_bytes / self.page_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of context while every group keeps it, padding included."""
        return sum(self.page_bytes / group.block_size for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Layers over all groups."""
        return sum(len(group.layers) for group in self.groups)

    def locate(self, layer: int) -> tuple[int, int]:
        """`(group, index within the group)` of a layer."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise ValueError(f"layer: no layer {layer} in this plan of {self.num_layers} layers")


def plan_kv_cache(specs: Sequence[KVCacheSpec], *, unify: str = "block_size") -> KVCachePlan:
    """Group layers and give all groups pages of one size.

    Args:
        specs: one per layer.
        unify: `block_size` uses multiples of the groups' block sizes (up to 256 tokens) that need
            little padding: the smallest page with at most 5 % of waste in every group, else the
            min waste. `padding` keeps block sizes and only pads.

    Raises:
        ValueError: no layers, or an unknown `unify`.
    """
    if not specs:
        raise ValueError("specs: a cache needs at least one layer")
    if unify not in ("block_size", "padding"):
        raise ValueError(f"unify: expected 'block_size' or 'padding', got {unify!r}")
    buckets: dict[_Lifetime, list[int]] = {}
    for layer, spec in enumerate(specs):
        buckets.setdefault(_Lifetime.of(spec), []).append(layer)
    groups = [KVCacheGroup.of(layers, [specs[i] for i in layers]) for layers in buckets.values()]
    if unify == "block_size" and len(groups) > 1:
        # Padding that the specs came with was for another page size.
        groups = [group.with_block_size(group.block_size) for group in groups]
        groups = [
            group.with_block_size(group.block_size * multiple)
            for group, multiple in zip(groups, _best_multiples(groups), strict=True)
        ]
    return KVCachePlan(tuple(groups), max(group.extent for group in groups))


class _Lifetime(NamedTuple):
    """What decides when a layer's pages are released."""

    window: int | None
    chunk: int | None
    block_size: int

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "_Lifetime":
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
        return cls(window, chunk, spec.block_size)


def _best_multiples(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Multiples of each group's block size with little padding; the smallest such page.

    A page's bytes are proportional to its block size, so candidates are compared by `extent` alone.
    """
    best: tuple[int, ...] = (1,) * len(groups)
    best_key: tuple[float, int] | None = None
    # In the best plan at least one group has no padding. For each such page, the other groups use
    # the largest multiple that fits.
    for filling in groups:
        for multiple in range(1, _max_multiple(filling) + 1):
            page = multiple * filling.extent
            fits = [min(page // group.extent, _max_multiple(group)) for group in groups]
            if min(fits) < 1:
                continue
            sizes = [n * group.extent for n, group in zip(fits, groups, strict=True)]
            waste = 1 - min(sizes) / max(sizes)
            key = (max(waste, _ACCEPTABLE_WASTE), max(sizes))
            if best_key is None or key < best_key:
                best, best_key = tuple(fits), key
    return best


def _max_multiple(group: KVCacheGroup) -> int:
    return max(1, MAX_BLOCK_SIZE // group.block_size)
