"""One forward pass over the pool: whose tokens these are, and where their K and V go."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from halfbyte.attention import AttentionPlans, paged_attention
from halfbyte.kvcache import (
    KVScales,
    PagedKVPool,
    SequenceTables,
    get_kv_cache_quant_method,
    reshape_and_cache,
)


@dataclass(frozen=True)
class PagedBatch:
    """A flat ragged batch, handed to every layer's attention.

    Args:
        pool: where K and V are written and read.
        scales: `(k_scale, v_scale)` per layer.
        query_start_loc: int32 `[sequences + 1]`.
        seq_lens: int32 `[sequences]`, this batch's tokens included.
        block_tables: per group, int32 `[sequences, max_pages]`.
        slot_mapping: per group, int64 `[tokens]`.
        backend: name of an attention backend, or None to choose.
        batch_invariant: ask for bitwise equal rows whatever the batch.
    """

    pool: PagedKVPool
    scales: Sequence[tuple[float | torch.Tensor, float | torch.Tensor]]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slot_mapping: Sequence[torch.Tensor]
    backend: str | None = None
    batch_invariant: bool = False
    plans: AttentionPlans = field(default_factory=AttentionPlans)
    """Shared by the layers, which all have these lengths."""
    layers_run: set[int] = field(default_factory=set)
    """Layers whose attention has run: proof that the object reached them."""

    @classmethod
    def of(
        cls,
        tables: SequenceTables,
        scales: Sequence[tuple[float | torch.Tensor, float | torch.Tensor]],
        chunks: Sequence[tuple[object, int]],
        backend: str | None = None,
        batch_invariant: bool = False,
    ) -> "PagedBatch":
        """The batch of the last `count` tokens of each `(sequence, count)` in `chunks`."""
        device = tables.pool.device
        counts = torch.tensor([0] + [count for _, count in chunks])
        lengths = [tables.length(seq) for seq, _ in chunks]
        block_tables, slot_mapping = [], []
        for group in range(len(tables.pool.plan.groups)):
            rows = tables.block_table([seq for seq, _ in chunks], group)
            block_tables.append(torch.from_numpy(rows).to(device))
            slots = [
                tables.slots(seq, length - count, length, group)
                for (seq, count), length in zip(chunks, lengths, strict=True)
            ]
            slot_mapping.append(torch.cat(slots).to(device))
        return cls(
            pool=tables.pool,
            scales=scales,
            query_start_loc=counts.cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            backend=backend,
            batch_invariant=batch_invariant,
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
        """Write this batch's K and V of a layer, then attend through the cache.

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
        k_scale, v_scale = self.scales[layer]
        reshape_and_cache(key, value, pages, self.slot_mapping[group], layout, k_scale, v_scale)
        return paged_attention(
            query,
            pages,
            layout=layout,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables[group],
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sliding_window=sliding_window,
            sinks=sinks,
            softcap=softcap,
            batch_invariant=self.batch_invariant,
            backend=self.backend,
            plans=self.plans,
        )


def multipliers_on(
    device: torch.device, scales: Sequence[tuple[float, float]]
) -> Sequence[tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Scales where kernels read them: on a GPU as tensors, filled once and not in every step."""
    if device.type != "cuda":
        return scales
    on_device = torch.tensor(scales, dtype=torch.float32, device=device)
    return [(k_scale, v_scale) for k_scale, v_scale in on_device]


def layer_multipliers(pool: PagedKVPool, scales: KVScales | None) -> list[tuple[float, float]]:
    """Decode multipliers `(k_scale, v_scale)` of every layer, for the format that it is stored in.

    Raises:
        ValueError: a layer needs a scale and there is none.
    """
    multipliers = []
    for layer in range(pool.plan.num_layers):
        layout = pool.layout(layer)
        methods = [get_kv_cache_quant_method(d) for d in (layout.k_dtype, layout.v_dtype)]
        if not any(method.needs_global_scale() for method in methods):
            multipliers.append((1.0, 1.0))
            continue
        if scales is None:
            raise ValueError(f"KV scales: layer {layer} is {layout.k_dtype} and has no scale")
        amax = scales.amax_of_layer(layer)
        k, v = (m.global_scale_from_amax(a) for m, a in zip(methods, amax, strict=True))
        multipliers.append((k, v))
    return multipliers
