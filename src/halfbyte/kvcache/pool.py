"""The bytes of the cache: one uint8 tensor `[num_pages, page_bytes]`, page-major.

A page holds its tokens for all layers of its group in one contiguous range, scales included, so
copying, swapping, sending or sharing a page is one byte copy and can never lose its scales. The
pool does not know which sequence holds a page: see `allocator` and `sequences`.
"""

from collections.abc import Sequence

import torch

from halfbyte.kvcache.plan import KVCacheGroup, KVCachePlan, plan_kv_cache
from halfbyte.kvcache.specs import KVCacheSpec
from halfbyte.layouts import PageLayout


class PagedKVPool:
    """Pages for all layers of a model.

    Args:
        plan: groups of layers, or the layers' specs, to be grouped.
        num_pages: pages, the null page included.
        device: of the bytes.

    `identity` names formats, scales and recipe (`kvcache.identity`); None until they are known.
    """

    def __init__(
        self,
        plan: KVCachePlan | Sequence[KVCacheSpec],
        num_pages: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.identity: str | None = None
        self.plan = plan if isinstance(plan, KVCachePlan) else plan_kv_cache(plan)
        # Zeroed, so that no reader of a whole page ever meets a stale NaN scale.
        self.buffer = torch.zeros(
            (num_pages, self.plan.page_bytes), dtype=torch.uint8, device=device
        )

    @property
    def num_pages(self) -> int:
        """Pages, the null page included."""
        return self.buffer.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.buffer.numel()

    @property
    def device(self) -> torch.device:
        """Device of the bytes."""
        return self.buffer.device

    def layout(self, layer: int) -> PageLayout:
        """Layout of a layer's pages."""
        group, index = self.plan.locate(layer)
        return self.plan.groups[group].specs[index].layout

    def layer_pages(self, layer: int) -> torch.Tensor:
        """A layer's pages: a view, uint8 `[num_pages, page bytes of the layer]`."""
        group, index = self.plan.locate(layer)
        return _layer_slice(self.buffer, self.plan.groups[group], index)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages within the pool; no page may be both a source and a target."""
        if len(sources):
            self.buffer[_index(targets, self.device)] = self.buffer[_index(sources, self.device)]

    def read_pages(self, pages: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Bytes of pages, uint8 `[n, page_bytes]`, copied to `device`."""
        return self.buffer[_index(pages, self.device)].to(device)

    def write_pages(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Put bytes read with `read_pages` into pages."""
        expected = (len(pages), self.plan.page_bytes)
        if data.dtype != torch.uint8 or tuple(data.shape) != expected:
            raise ValueError(
                f"data: expected uint8 {expected}, got {data.dtype} {tuple(data.shape)}"
            )
        if len(pages):
            self.buffer[_index(pages, self.device)] = data.to(self.device)

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool; contents and page numbers stay, views taken before do not."""
        if num_pages < self.num_pages:
            raise ValueError(f"num_pages: cannot shrink from {self.num_pages} to {num_pages}")
        extra = self.buffer.new_zeros((num_pages - self.num_pages, self.plan.page_bytes))
        self.buffer = torch.cat([self.buffer, extra])

    def to(self, device: torch.device | str) -> "PagedKVPool":
        """Move the bytes to a device; returns the pool itself."""
        self.buffer = self.buffer.to(device)
        return self

    def shard(
        self, rank: int, world_size: int, pages: Sequence[Sequence[int]] | None = None
    ) -> "PagedKVPool":
        """A new pool with rank's share of every layer's KV heads, page numbers unchanged.

        Args:
            rank, world_size: which share, of how many.
            pages: per group, the pages that belong to it (`SequenceTables.pages_of_groups`),
                because the layouts of groups differ; not needed with one group.

        Raises:
            ValueError: a layer's heads cannot be divided by `world_size`, or there are several
                groups and no `pages`.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 .. {world_size - 1}, got {rank}")
        pages = self._pages_of_groups(pages)
        plan = _plan_with_heads(self.plan, 1, world_size)
        shard = PagedKVPool(plan, self.num_pages, self.device)
        for layer in range(plan.num_layers):
            heads = shard.layout(layer).num_kv_heads
            _copy_heads(self, rank * heads, shard, 0, layer, heads, pages)
        shard.identity = self.identity
        return shard

    @classmethod
    def from_shards(
        cls, shards: Sequence["PagedKVPool"], pages: Sequence[Sequence[int]] | None = None
    ) -> "PagedKVPool":
        """The inverse of `shard`: one pool with the heads of all, in order.

        Raises:
            ValueError: pools of different plans, numbers of pages, scales or recipes.
        """
        if not shards or any(shard.plan != shards[0].plan for shard in shards):
            raise ValueError("shards: expected one or more pools of one plan")
        if any(shard.num_pages != shards[0].num_pages for shard in shards):
            raise ValueError("shards: expected pools of one number of pages")
        if any(shard.identity != shards[0].identity for shard in shards):
            raise ValueError("shards: expected pools of the same scales and recipe")
        plan = _plan_with_heads(shards[0].plan, len(shards), 1)
        pool = cls(plan, shards[0].num_pages, shards[0].device)
        pages = pool._pages_of_groups(pages)
        for rank, shard in enumerate(shards):
            for layer in range(plan.num_layers):
                heads = shard.layout(layer).num_kv_heads
                _copy_heads(shard, 0, pool, rank * heads, layer, heads, pages)
        pool.identity = shards[0].identity
        return pool

    def _pages_of_groups(self, pages: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
        num_groups = len(self.plan.groups)
        if pages is None and num_groups == 1:
            return [range(self.num_pages)]
        if pages is None or len(pages) != num_groups:
            raise ValueError(f"pages: expected the pages of each of {num_groups} groups")
        return pages


def _index(pages: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(pages, dtype=torch.int64, device=device)


def _layer_slice(buffer: torch.Tensor, group: KVCacheGroup, index: int) -> torch.Tensor:
    start = group.offsets[index]
    return buffer[:, start : start + group.specs[index].page_size_bytes]


def _plan_with_heads(plan: KVCachePlan, numerator: int, denominator: int) -> KVCachePlan:
    """The plan with every layer's KV heads times numerator / denominator, block sizes kept."""
    groups = []
    for group in plan.groups:
        specs = []
        for spec in group.specs:
            if spec.num_kv_heads * numerator % denominator:
                raise ValueError(
                    f"world_size: {spec.num_kv_heads} KV heads cannot be divided by {denominator}"
                )
            specs.append(spec.with_num_kv_heads(spec.num_kv_heads * numerator // denominator))
        groups.append(KVCacheGroup.of(group.layers, specs))
    return KVCachePlan(tuple(groups), max(group.extent for group in groups))


def _copy_heads(
    source: PagedKVPool,
    source_head: int,
    target: PagedKVPool,
    target_head: int,
    layer: int,
    count: int,
    pages: Sequence[Sequence[int]],
) -> None:
    """Copy `count` heads of one layer, region by region; bytes only, nothing is decoded."""
    group, _ = source.plan.locate(layer)
    rows = _index(pages[group], source.device)
    source_views = source.layout(layer).views(source.layer_pages(layer))
    target_views = target.layout(layer).views(target.layer_pages(layer))
    for from_view, to_view in zip(source_views, target_views, strict=True):
        if from_view is not None and to_view is not None:
            heads = from_view[rows, :, source_head : source_head + count]
            to_view[rows, :, target_head : target_head + count] = heads
