"""One forward pass over the pool: its tokens, their sequences and their slots."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.attention.recent.rings import attend_with_rings
from halfbyte.kvcache import (
    KVRecipe,
    KVScales,
    NewTokens,
    PagedKVPool,
    SequenceTables,
)
from halfbyte.kvcache.identity import plan_identity
from halfbyte.kvcache.layer import LayerQuantization
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.kvcache.recent_step import LayerPages, RecentStep
from halfbyte.kvcache.transform import KVTransform


@dataclass(frozen=True)
class KVQuantization:
    """Quantization of each layer's K and V.

    Args:
        scales: `(k_scale, v_scale)` per layer; on a GPU tensors, which kernels read there and which
            are copied once, not in every step.
        transforms: per layer, the recipe's transform of K before quantization, or None.
    """

    scales: Sequence[tuple[float | torch.Tensor, float | torch.Tensor]]
    transforms: Sequence[KVTransform | None]

    def check_length(self, length: int) -> None:
        """Raise ValueError for a sequence longer than the calibrated means of K."""
        limits = (x.max_position for x in self.transforms if x is not None)
        limit = min((x for x in limits if x is not None), default=length)
        if length > limit:
            raise ValueError(
                f"kv_recipe: the calibration has means of K for {limit} tokens, a sequence has "
                f"{length}"
            )

    @classmethod
    def of(
        cls, pool: PagedKVPool, scales: KVScales | None, recipe: KVRecipe | None = None
    ) -> "KVQuantization":
        """Quantization of every layer of a pool; sets its identity. See `LayerQuantization.of`.

        Raises:
            ValueError: as `LayerQuantization.of`; the calibration is another model's; the pool has
                pages with other scales or another recipe.
        """
        layouts = [pool.layout(layer) for layer in range(pool.plan.num_layers)]
        if scales is not None and recipe is not None and recipe.changes_k:
            for i, layout in enumerate(layouts):
                if layout.k_dtype.is_nvfp4:
                    scales.check_heads(i, layout.num_kv_heads, layout.head_size)
        layers = [
            LayerQuantization.of(scales, i, layout.k_dtype, layout.v_dtype, recipe, pool.device)
            for i, layout in enumerate(layouts)
        ]
        identity = plan_identity(pool.plan, scales, recipe)
        if pool.identity not in (None, identity):
            raise ValueError("pool: has pages of other scales or another recipe")
        pool.identity = identity
        transforms = [layer.transform for layer in layers]
        pairs = [(layer.k_scale, layer.v_scale) for layer in layers]
        if pool.device.type != "cuda":
            return cls(pairs, transforms)
        on_device = torch.tensor(pairs, dtype=torch.float32, device=pool.device)
        return cls([(k_scale, v_scale) for k_scale, v_scale in on_device], transforms)


@dataclass(frozen=True)
class RecentBatch:
    """A step's reads and writes of the rings with the sequences' last tokens.

    Args:
        tables: of the sequences; they own the rings.
        step: positions of the tokens in the rings.
        sequences: ids, in the order of the batch.
    """

    tables: SequenceTables
    step: RecentStep
    sequences: Sequence[object] = ()

    @classmethod
    def of(
        cls, tables: SequenceTables, chunks: Sequence[tuple[object, int]]
    ) -> "RecentBatch | None":
        """For the last `count` tokens of each `(sequence, count)`; None without rings."""
        if tables.recent is None:
            return None
        lengths = [tables.length(seq) for seq, _ in chunks]
        counts = [count for _, count in chunks]
        missing = [tables.missing_recent(seq, tables.length(seq) - n) for seq, n in chunks]
        step = RecentStep.of(
            tables.recent.tokens,
            tables.recent.ring,
            [tables.entry(seq) for seq, _ in chunks],
            lengths,
            counts,
            missing,
            tables.pool.device,
        )
        return cls(tables, step, [seq for seq, _ in chunks])

    @property
    def tokens(self) -> RecentTokens:
        """The rings."""
        assert self.tables.recent is not None
        return self.tables.recent

    def end(self) -> None:
        """Record that the rings are complete; call after all layers have run."""
        for number, _, positions, _ in self.step.missing:
            self.tables.fill_recent(self.sequences[number], positions.start)


@dataclass(frozen=True)
class PagedBatch:
    """A flat ragged batch, passed to every layer's attention.

    Args:
        pool: stores K and V.
        quantization: of each layer's K and V.
        query_start_loc: int32 `[sequences + 1]`.
        seq_lens: int32 `[sequences]`, this batch's tokens included.
        block_tables: per group, int32 `[sequences, max_pages]`.
        slot_mapping: per group, int64 `[tokens]`.
        positions: int64 `[tokens]`, position of each token in its sequence.
        backend: name of an attention backend, or None to choose.
        batch_invariant: require results that are bitwise independent of the batch.
    """

    pool: PagedKVPool
    quantization: KVQuantization
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slot_mapping: Sequence[torch.Tensor]
    positions: torch.Tensor
    backend: str | None = None
    batch_invariant: bool = False
    plans: AttentionPlans = field(default_factory=AttentionPlans)
    """Attention plans, shared by the layers because all have the same lengths."""
    recent: RecentBatch | None = None
    layers_run: set[int] = field(default_factory=set)
    """Layers whose attention has run: checks that the batch reached every layer."""

    @classmethod
    def of(
        cls,
        tables: SequenceTables,
        quantization: KVQuantization,
        chunks: Sequence[tuple[object, int]],
        backend: str | None = None,
        batch_invariant: bool = False,
    ) -> "PagedBatch":
        """The batch of the last `count` tokens of each `(sequence, count)` in `chunks`."""
        device = tables.pool.device
        counts = torch.tensor([0] + [count for _, count in chunks], device="cpu")
        lengths = [tables.length(seq) for seq, _ in chunks]
        quantization.check_length(max(lengths, default=0))
        block_tables, slot_mapping = [], []
        for group in range(len(tables.pool.plan.groups)):
            rows = tables.block_table([seq for seq, _ in chunks], group)
            block_tables.append(torch.from_numpy(rows).to(device))
            slots = [
                tables.slots(seq, length - count, length, group)
                for (seq, count), length in zip(chunks, lengths, strict=True)
            ]
            slot_mapping.append(torch.cat(slots).to(device))
        positions = [
            torch.arange(length - count, length, device="cpu")
            for (_, count), length in zip(chunks, lengths, strict=True)
        ]
        return cls(
            pool=tables.pool,
            quantization=quantization,
            query_start_loc=counts.cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            positions=torch.cat(positions).to(device),
            backend=backend,
            batch_invariant=batch_invariant,
            recent=RecentBatch.of(tables, chunks),
        )

    def store_and_attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write this batch's K and V of a layer, then attend to the cache.

        Args:
            layer: index of the layer.
            query: `[tokens, heads, D]`.
            key, value: `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`.
            scale, sliding_window, sinks, softcap: as for `paged_attention`.

        Returns:
            `[tokens, heads, Dv]`.
        """
        self.layers_run.add(layer)
        group, _ = self.pool.plan.locate(layer)
        pages, layout = self.pool.layer_pages(layer), self.pool.layout(layer)
        k_scale, v_scale = self.quantization.scales[layer]
        transform = self.quantization.transforms[layer]
        tables = self.block_tables[group]
        new = NewTokens(key, value, self.slot_mapping[group], self.positions)
        attend = partial(
            paged_attention,
            query,
            pages,
            layout=layout,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_tables=tables,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sliding_window=sliding_window,
            sinks=sinks,
            softcap=softcap,
            batch_invariant=self.batch_invariant,
            backend=self.backend,
            plans=self.plans,
            transform=transform,
        )
        recent = self.recent
        if recent is None:
            return attend(new=new)
        rings, step = recent.tokens[layer], recent.step
        if rings is None or step is None:
            result = attend(new=new)
        else:
            packed = LayerPages(pages, layout, tables, k_scale, v_scale, transform)
            ring_tokens = recent.tokens.tokens
            result = attend_with_rings(
                attend, step, rings, ring_tokens, packed, new, sliding_window
            )
        if len(self.layers_run) == self.pool.plan.num_layers:
            recent.end()
        return result
