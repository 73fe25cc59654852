"""Tiles of `gemm.cu`: how many tokens, stages and slots; decided by shapes alone."""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.experts import BLOCK_SIZES

ROWS = 128
"""Rows of W in a CTA's tile; a cluster has two."""
STEP_K = 128
"""k per step."""
LINE_K = 256
"""k in a line of the cache. Copies of whole lines of W take half as many requests to L2, but a slot
is free only after 256 k."""
LINE_PARTS = 8
"""Parts of a run of rows of down in copies of whole lines: `ROW_PARTS` of `work.cuh`."""
STRIP = 16
"""The sorted pairs of each expert begin at a multiple of this."""
MAX_PAIRS = 2**20
"""Max pairs, because every CTA of the sort kernel counts all expert ids."""
SORT_THREADS = 512
_MAX_STAGES = 12
_MIN_STAGES = {1: 4, 2: 6, 3: 6}
"""Min stages of the ring, by CTAs per SM."""
_BARRIER_BYTES = 256 + 16
"""Shared memory for barriers, and padding after the block scales."""
_STEP_MICROSECONDS = {16: 0.56, 32: 0.61, 64: 0.74, 96: 0.97, 128: 1.14, 192: 1.61, 256: 2.1}
"""Time of a step by the width of its matmuls, with one CTA per SM: fitted to times of both products
on an H100, within 4 %, for 16 to 256 tokens and experts of Qwen3-30B-A3B and GPT-OSS-20B. Those of
192 and 256 are that of 128 times ratios measured for dense layers."""
WIDTHS = {
    16: (16,),
    32: (32,),
    64: (64,),
    128: (32, 64, 96, 128),
    192: (64, 128, 192),
    256: (128, 256),
}
"""Widths of matmuls, multiples of the first, by max tokens of a tile: an expert's last tile has the
narrowest that suffices. Registers do not allow all of them."""
_OF_MORE_CTAS = 0.79
"""Factor of a step's time with two or three CTAs per SM, relative to one; from the same fit."""
MAX_CTAS = {16: 3, 32: 2, 64: 2, 128: 1, 192: 1, 256: 1}
"""Max CTAs per SM, by tokens of a tile. Several hide each other's latency where steps are short."""
TOKENS = tuple(WIDTHS)
"""Max tokens of a tile."""
_TILE_STEPS = 1.1
"""Cost of starting and storing a tile, in steps; from the same fit."""
_SAMPLES = 32
_MAX_TOKENS_OF_LINES = 128
"""Max tokens of a tile for copies of whole lines; larger tiles need the memory for x."""
_WANTED_MICROSECONDS = 3.3
"""Time that the stages in flight should cover: the latency of HBM under load."""


class MoeGemmPlan(NamedTuple):
    """Macros of a launch, named as in `gemm.cu`."""

    tokens: int
    weight_k: int
    """Of a copy of W: `LINE_K` or `STEP_K`."""
    weight_slots: int
    """Copies of W in their ring."""
    stages: int
    """Stages of x in their ring, 64 k each; an even number."""
    scale_slots: int
    """Tiles whose block scales fit into shared memory at a time."""
    ctas: int = 1
    """CTAs per SM."""

    def macros(self, work: Work) -> tuple[tuple[str, int], ...]:
        """Macros of the source except those of the dtype."""
        return (
            ("MX", int(work.weight_format == "mxfp4")),
            ("GATED", int(work.gated)),
            ("INTERLEAVED", int(work.interleaved)),
            ("TOKENS", self.tokens),
            ("WIDTH_STEP", WIDTHS[self.tokens][0]),
            ("WEIGHT_K", self.weight_k),
            ("WEIGHT_SLOTS", self.weight_slots),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
            ("SCALE_SLOTS", self.scale_slots),
        )

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory of a CTA: rings, output, barriers, block scales."""
        weights = self.weight_slots * ROWS * self.weight_k // 2
        x = self.stages * self.tokens * 128
        out = ROWS * max(32, self.tokens * (1 if work.gated else 2))
        scales = ROWS * work.k // BLOCK_SIZES[work.weight_format]
        return weights + x + out + _BARRIER_BYTES + self.scale_slots * scales


def steps(work: Work) -> int:
    """Steps in padded K."""
    return -(-work.k // STEP_K)


def row_pairs(work: Work) -> int:
    """Pairs of tiles of rows: gated, 128 rows of each of gate and up."""
    return -(-work.n // (2 * ROWS))


def make_plan(work: Work, tokens: int, block_bytes: int) -> MoeGemmPlan | None:
    """The plan of a product with tiles of so many tokens; None if shared memory has no room.

    Args:
        block_bytes: max shared memory of a CTA.
    """
    for ctas in range(MAX_CTAS[tokens], 0, -1):
        room = (block_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES
        wanted = 2 * ceil(_WANTED_MICROSECONDS / ctas / _STEP_MICROSECONDS[tokens])
        # Whole lines if they fit.
        for weight_k in (LINE_K, STEP_K) if tokens <= _MAX_TOKENS_OF_LINES else (STEP_K,):
            plans = [
                plan
                for scale_slots in (1, 2)
                for stages in range(_MIN_STAGES[ctas], _MAX_STAGES + 1, 2)
                for weight_slots in _weight_slots(weight_k, stages)
                if (plan := MoeGemmPlan(tokens, weight_k, weight_slots, stages, scale_slots, ctas))
                and plan.shared_bytes(work) <= room
            ]
            if plans:
                return max(plans, key=lambda plan: _preference(plan, wanted))
    return None


def _preference(plan: MoeGemmPlan, wanted: int) -> tuple[int, ...]:
    # A second slot hides the latency of a tile's scales, unless the ring of x would be too short.
    first = min(plan.stages, wanted), plan.scale_slots
    if plan.tokens * 2 > ROWS // 2:  # more bytes of x than of W
        return *first, plan.stages, plan.weight_slots
    return *first, plan.weight_slots, plan.stages


def _weight_slots(weight_k: int, stages: int) -> tuple[int, ...]:
    """Possible copies in the ring of W: for as many k as in that of x, or two or three lines."""
    return (stages // 2,) if weight_k == STEP_K else (2, 3)


def max_rows(num_pairs: int, num_experts: int) -> int:
    """Max rows of sorted pairs, with those between experts."""
    padding = (STRIP - 1) * min(num_pairs, num_experts)
    return -(-(num_pairs + padding) // STRIP) * STRIP


def max_tiles(num_pairs: int, num_experts: int, tokens: int) -> int:
    """Max tiles of any routing: every expert that is hit may have one that is not full."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // tokens


@lru_cache(maxsize=4096)
def choose_tokens(
    works: tuple[Work, ...], num_pairs: int, block_bytes: int, num_sms: int
) -> int | None:
    """Tokens of a tile for both products, by their estimated time; None if none has room."""
    possible = [
        tokens
        for tokens in TOKENS
        if all(make_plan(work, tokens, block_bytes) is not None for work in works)
    ]

    def microseconds(tokens: int) -> float:
        tiles, column = _mean_tiles(num_pairs, works[0].num_experts, tokens)
        took = 0.0
        for work in works:
            plan = make_plan(work, tokens, block_bytes)
            assert plan is not None, "`possible` has checked it"
            waves = max(1.0, tiles * row_pairs(work) / (num_sms // 2))
            factor = 1.0 if plan.ctas == 1 else _OF_MORE_CTAS
            took += waves * (steps(work) + _TILE_STEPS) * column / tiles * factor
        return took

    return min(possible, key=microseconds, default=None)


def _mean_tiles(num_pairs: int, num_experts: int, tokens: int) -> tuple[float, float]:
    """Number of tiles of all experts, and the sum of the times of one step of each in µs; pairs per
    expert are assumed uniform between half and one and a half times their mean."""
    hit = min(num_pairs, num_experts)
    tiles = microseconds = 0.0
    for i in range(_SAMPLES):
        whole, rest = divmod(num_pairs / hit * (0.5 + (i + 0.5) / _SAMPLES), tokens)
        width = next(width for width in WIDTHS[tokens] if rest <= width)
        tiles += whole + (rest > 0)
        microseconds += whole * _STEP_MICROSECONDS[tokens]
        microseconds += _STEP_MICROSECONDS[width] if rest else 0.0
    return tiles * hit / _SAMPLES, microseconds * hit / _SAMPLES
