"""What `store.cu` is compiled for, and the grid of a launch."""

from typing import NamedTuple

import torch

from halfbyte.kernels.runtime.parameters import REGION_FIELDS, region_fields
from halfbyte.kvcache.transform import MARK, MATCH_TOLERANCE
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.formats import KV_FORMATS
from halfbyte.numerics.nvfp4 import BLOCK_SIZE

V_KINDS = {
    KVCacheDType(name): row.cuda_store_id
    for name, row in KV_FORMATS.items()
    if row.cuda_store_id is not None
}
"""Formats of V, and their values of the macro `V_KIND`."""
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Values of the macros `KEY_TYPE`, `VALUE_TYPE` and `FIRST_TYPE`."""
BY_BLOCK, BY_ROW, BY_TILE, BY_LANES = 1, 2, 3, 4
"""Values of the macro `BY`."""
TILE = 32
"""Tokens of a warp's tile."""
_LANE_VALUES_V = 4
"""Values of V of a lane with `BY_LANES`."""
_SCALE_ENTRIES = 132
"""Block scales with their reciprocals in shared memory, for error feedback by rows."""


class StoreVariant(NamedTuple):
    """What `store.cu` is compiled for, in addition to the layout."""

    key_dtype: torch.dtype
    value_dtype: torch.dtype
    first_dtype: torch.dtype | None
    """Of the constants for first tokens; None where there are none."""
    rotate: bool
    segment: int
    """Tokens that share a mean; 0 where K is not centred."""
    k_weighted: bool
    v_weighted: bool
    by: int
    ring: bool
    in_words: bool
    """Whether codes begin at multiples of four bytes."""
    small_grid: bool = False
    """Whether the launch does not fill the GPU. Then all blocks are rounded by the definition,
    without the shortcut of `scales.cuh`: one warp for which it fails would delay the launch."""
    left_out: bool = False
    """Whether tiles lack their first blocks."""

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return 2 if self.by == BY_TILE and not self.left_out else 4

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    def shared_bytes(self, layout: PageLayout) -> int:
        """Dynamic shared memory: `SharedRows`, a tile for each warp, or two blocks and
        `KeyState` for each thread. (Where a thread has one token, nothing.)"""
        size, warps = layout.head_size, self.warps
        block = BLOCK_SIZE * max(self.key_dtype.itemsize, self.value_dtype.itemsize)
        ahead = 0 if self.small_grid else 2 * block * self.threads
        if self.by == BY_ROW:
            factors = size * (_stages(layout) * BLOCK_SIZE + 1)
            return max(ahead, 4 * (factors + 4 * _SCALE_ENTRIES + warps * (size + BLOCK_SIZE)))
        if self.by == BY_TILE:
            channels = size - BLOCK_SIZE * self.left_out
            return max(ahead, 4 * warps * channels * TILE)
        return 0 if self.small_grid else ahead + 96 * self.threads

    def k_ctas(self, layout: PageLayout, num_slots: int, tokens: int) -> int:
        """CTAs that store K. With `BY_BLOCK` a thread has one block of each of `tokens` tokens."""
        heads, warps = layout.num_kv_heads, self.warps
        if self.by == BY_ROW:
            return heads * -(-num_slots // warps)
        if self.by == BY_TILE:
            return -(-heads * -(-num_slots // TILE) // warps)
        threads = layout.head_size // BLOCK_SIZE
        if self.by == BY_LANES:
            threads = layout.head_size // _lane_values(layout)
        return -(-_groups(num_slots, tokens) * heads * threads // self.threads)

    def v_ctas(self, layout: PageLayout, num_slots: int, tokens: int) -> int:
        """CTAs that store V; a thread has one block of each of `tokens` tokens."""
        values = _LANE_VALUES_V if self.by == BY_LANES and self.v_weighted else BLOCK_SIZE
        threads = layout.num_kv_heads * (layout.head_size_v // values)
        return -(-_groups(num_slots, tokens) * threads // self.threads)

    def macros(self, layout: PageLayout) -> dict[str, int | None]:
        """Macros that `store.cu` is compiled with."""
        of_regions = region_fields(layout)
        by_tile = 4 if self.left_out else 6
        by_block = 5 if self.k_weighted and not self.small_grid else 4
        ctas_per_sm = {BY_BLOCK: by_block, BY_ROW: 2, BY_TILE: by_tile, BY_LANES: 8}[self.by]
        return {
            "HEAD_SIZE": layout.head_size,
            "HEAD_SIZE_V": layout.head_size_v,
            "KV_HEADS": layout.num_kv_heads,
            "BLOCK_SIZE": layout.block_size,
            **{name.upper(): of_regions[name] for name in REGION_FIELDS},
            "FOUR_OVER_SIX": int(layout.k_dtype.kv_format.nvfp4_recipe == "four_over_six"),
            "V_KIND": V_KINDS[layout.v_dtype],
            "SM100": int(layout.v_scale_layout == "sm100"),
            "KEY_TYPE": TYPES[self.key_dtype],
            "VALUE_TYPE": TYPES[self.value_dtype],
            "FIRST_TYPE": -1 if self.first_dtype is None else TYPES[self.first_dtype],
            "MARK": MARK,
            "TOLERANCE_EXPONENT": _TOLERANCE_EXPONENT,
            "ROTATE": int(self.rotate),
            "SEGMENT": self.segment,
            "K_WEIGHTED": int(self.k_weighted),
            "V_WEIGHTED": int(self.v_weighted),
            "BY": self.by,
            "RING": int(self.ring),
            "IN_WORDS": int(self.in_words),
            "WARPS": self.warps,
            "LEFT_OUT": int(self.left_out),
            "STAGES": _stages(layout),
            "CTAS_PER_SM": ctas_per_sm,
            "SMALL_GRID": int(self.small_grid),
            "LANE_VALUES": _lane_values(layout),
            "LANE_VALUES_V": _LANE_VALUES_V,
        }


def _lane_values(layout: PageLayout) -> int:
    """Values of K of a lane with `BY_LANES`: a warp's 32 lanes have room for a head."""
    return max(4, layout.head_size // 32)


def _stages(layout: PageLayout) -> int:
    """Blocks of a factor in shared memory: all of them, up to 64 KiB."""
    parts = layout.head_size // BLOCK_SIZE
    return parts if parts <= 8 else 4


_TOLERANCE_EXPONENT = int(1 / MATCH_TOLERANCE).bit_length() - 1


def _groups(num_slots: int, tokens: int) -> int:
    return -(-num_slots // tokens)
