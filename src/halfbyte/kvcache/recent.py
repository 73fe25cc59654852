"""Recent tokens of running sequences: K and V in the model's dtype, in ring buffers.

Recent keys get much of the attention: the last 16 tokens almost a third of it in small language
models. So a query at position p reads K and V of positions after p - R from here, and older ones
from the pages. All tokens are packed into pages at once, too: nothing is copied later, results do
not depend on how a prompt was split into chunks, and memory is proportional to the number of
running sequences, not of cached tokens.

A sequence has an entry, a ring of R + `SLACK` slots per layer and KV head; position p is in slot
p % ring. With the slack, up to `SLACK` tokens can be cropped (rejected drafts) without losing the
ones that they overwrote. If more are cropped, the slots are filled from the pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from halfbyte.dispatch import missing_module
from halfbyte.kvcache.plan import KVCachePlan
from halfbyte.kvcache.recipe import KVRecipe
from halfbyte.layouts import PageLayout

PADDING_ENTRY = 0
"""Entry of no sequence: for rows that pad a captured graph, and for dummy steps."""
SLACK = 16
"""Max tokens that can be cropped without reading pages."""


class RecentInputs(NamedTuple):
    """Inputs of a layer's attention in addition to the pages.

    Args:
        tokens: R; a query at p reads keys after p - R from here.
        keys, values: rings `[entries, kv_heads, ring, D]` and `[entries, kv_heads, ring, Dv]`, with
            the tokens before this step's.
        entries: int32 `[sequences]`.
        key, value: of the step's tokens, `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`, in
            the order of the queries.
    """

    tokens: int
    keys: torch.Tensor
    values: torch.Tensor
    entries: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class RingSlots(NamedTuple):
    """Where tokens of a step go in a layer's rings.

    Args:
        keys, values: rings, as of `RecentInputs`.
        rows: int64 `[n]`, which tokens of the step.
        owners, slots: int64 `[n]`, entry and slot of each.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    owners: torch.Tensor
    slots: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write tokens to the rings in a separate kernel launch; does not sync.

        Args:
            key, value: of the step's tokens, `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`.
        """
        if key.is_cuda and not missing_module("triton", ""):
            # Here, because the import needs Triton.
            from halfbyte.kvcache.recent_kernel import write

            write(*self, key, value)
            return
        for ring, x in zip((self.keys, self.values), (key, value), strict=True):
            ring[self.owners, :, self.slots] = x[self.rows].to(ring.dtype)


def kept_after_crop(kept_from: int, length: int, new_length: int, ring: int) -> int:
    """First position of a sequence that its ring still has after a crop.

    Args:
        kept_from: the same before the crop.
        length, new_length: tokens before and after.
        ring: slots; positions further back have been overwritten.
    """
    return min(max(kept_from, length - ring), new_length)


def missing_positions(kept_from: int, length: int, tokens: int) -> range:
    """Positions that queries after `length` tokens read from a ring but that it does not have.

    Args:
        kept_from: first position of the sequence that the ring has.
        tokens: R.
    """
    return range(max(0, length - tokens + 1), min(kept_from, length))


def packed_part(tokens: int, seq_lens: torch.Tensor, window: int) -> tuple[torch.Tensor, int]:
    """Lengths and window for attention to the pages, without the recent tokens.

    Query positions are relative to the end: p becomes p - R.

    Args:
        tokens: R.
        seq_lens: int32 `[sequences]`.
        window: 0 for none.
    """
    if 0 < window <= tokens:  # all visible tokens are recent
        return torch.zeros_like(seq_lens), 0
    return (seq_lens - tokens).clamp_(min=0), max(0, window - tokens)


class RecentTokens:
    """Rings of all layers that have them, and the list of free entries.

    Args:
        layouts: per layer, of its pages.
        tokens: R, from 1 to 256.
        dtype: the model's.
        device: of the rings.
        capacity: initial number of entries, at least 2; grows as needed.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 8,
    ) -> None:
        if not 1 <= tokens <= 256:
            raise ValueError(f"tokens: expected 1 to 256, got {tokens}")
        self.tokens = tokens
        self.ring = tokens + SLACK
        self.count = 0
        """Entries, `PADDING_ENTRY` included."""
        self._free: list[int] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for layout in layouts:
            if not layout.k_dtype.is_nvfp4:
                self._layers.append(None)
                continue
            shape = (0, layout.num_kv_heads, self.ring)
            key, value = (
                torch.zeros((*shape, size), dtype=dtype, device=device)
                for size in (layout.head_size, layout.head_size_v)
            )
            self._layers.append((key, value))
        self._grow(max(2, capacity))

    @classmethod
    def of(
        cls,
        plan: KVCachePlan,
        recipe: KVRecipe,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 8,
    ) -> "RecentTokens | None":
        """Those of a plan's layers with K in NVFP4; None where a recipe keeps none.

        Args:
            dtype: the model's.
            device: of the rings.
            capacity: initial number of entries; growing beyond it moves the rings in memory.
        """
        places = [plan.locate(layer) for layer in range(plan.num_layers)]
        layouts = [plan.groups[group].specs[index].layout for group, index in places]
        if not recipe.recent_tokens or not any(layout.k_dtype.is_nvfp4 for layout in layouts):
            return None
        return cls(layouts, recipe.recent_tokens, dtype, device, capacity)

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V `[entries, kv_heads, ring, size]` of a layer, or None."""
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(x.nbytes for pair in self._layers if pair is not None for x in pair)

    def allocate(self) -> int:
        """Allocate an entry."""
        if not self._free:
            self._grow(2 * self.count)
        return self._free.pop()

    def free(self, entry: int) -> None:
        """Free an entry."""
        self._free.append(entry)

    def copy(self, source: int, target: int) -> None:
        """Copy all layers' tokens of an entry to another."""
        for pair in self._layers:
            for x in pair or ():
                x[target] = x[source]

    def read(self, entry: int) -> list[torch.Tensor]:
        """An entry's tokens, on the CPU."""
        return [x[entry].to("cpu", copy=True) for pair in self._layers for x in pair or ()]

    def fits(self, data: Sequence[torch.Tensor]) -> bool:
        """Whether an entry of these rings can be restored from the result of `read`."""
        own = [x.shape[1:] for pair in self._layers for x in pair or ()]
        return [x.shape for x in data] == own

    def write(self, entry: int, data: Sequence[torch.Tensor]) -> None:
        """Restore an entry's tokens from the result of `read`."""
        tensors = [x for pair in self._layers for x in pair or ()]
        for x, rows in zip(tensors, data, strict=True):
            x[entry] = rows.to(x.device)

    def _grow(self, count: int) -> None:
        """Enlarge to `count` entries; views taken before keep the old memory."""
        extra = count - self.count
        for i, pair in enumerate(self._layers):
            if pair is not None:
                key, value = (torch.cat([x, x.new_zeros((extra, *x.shape[1:]))]) for x in pair)
                self._layers[i] = key, value
        self._free += range(count - 1, max(PADDING_ENTRY + 1, self.count) - 1, -1)
        self.count = count
