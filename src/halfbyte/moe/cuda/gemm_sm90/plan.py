"""Tiles of `gemm.cu` and `narrow.cu`: tokens, stages and slots; decided by shapes alone."""

from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES
from halfbyte.moe.cuda.packed import TILE_ROWS
from halfbyte.moe.cuda.plan import Work

ROWS = 128
"""Rows of W in a CTA's tile; a cluster has two, and so has a CTA of `narrow.cu`."""
STEP_K = 128
"""k per step."""
NARROW = 16
"""Tokens of the tiles that `narrow.cu` computes, of 256 rows by a CTA without a cluster."""
STRIP = 16
"""The sorted pairs of each expert begin at a multiple of this."""
MAX_PAIRS = 2**20
"""Max pairs, because every CTA of the sort kernel counts all expert ids."""
SORT_THREADS = 512
LIST_THREADS, LIST_PAIRS = 1024, (1, 2, 8)
"""Threads of the only CTA of `list.cu`, and pairs per thread that it is compiled for."""
MAX_NARROW_PAIRS = LIST_THREADS * LIST_PAIRS[-1]
_MAX_STAGES = 12
_MIN_STAGES = {1: 4, 2: 6}
"""Min stages of the ring, by CTAs per SM."""
_BARRIER_BYTES = 256
_STEP_MICROSECONDS = {16: 0.46, 32: 0.61, 64: 0.74, 96: 0.97, 128: 1.14, 192: 1.61, 256: 2.1}
"""Time of a step by the width of its matmuls, with one CTA per SM: fitted to times of both products
on an H100, within 4 %, for 16 to 256 tokens and experts of Qwen3-30B-A3B and GPT-OSS-20B. Those of
192 and 256 are that of 128 times ratios measured for dense layers; that of 16 lets `narrow.cu` end
at a mean of 13 tokens per expert, where tiles of 32 took over on an H200 while tokens were still
sorted (`moe_narrow_variants.json`)."""
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
"""Factor of a step's time with two CTAs per SM, relative to one; from the same fit."""
MAX_CTAS = {16: 2, 32: 2, 64: 2, 128: 1, 192: 1, 256: 1}
"""Max CTAs per SM, by tokens of a tile. Several hide each other's latency where steps are short."""
TOKENS = tuple(WIDTHS)
"""Max tokens of a tile."""
_TILE_STEPS = 1.1
"""Cost of starting and storing a tile, in steps; from the same fit."""
_SAMPLES = 32
_SLOTS = {16: 3, 32: 3, 64: 3, 128: 4, 192: 3, 256: 3}
"""Steps of W that go before stages of x where shared memory is short, by tokens of a tile; more of
both are used as far as they fit (`benchmarks/results/moe_gemm_packed.json`)."""
_MAX_SLOTS = 6


class MoeGemmPlan(NamedTuple):
    """Macros of a launch, named as in `gemm.cu`, for which or for `narrow.cu` it is."""

    tokens: int
    weight_slots: int
    """Steps of 128 k in the ring of W."""
    stages: int
    """Stages of x in their ring, 64 k each; an even number. In `narrow.cu` two per slot."""
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
            ("WEIGHT_SLOTS", self.weight_slots),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
        )

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory of a CTA: rings, output, barriers."""
        rows = 2 * ROWS if self.tokens == NARROW else ROWS
        weights = self.weight_slots * rows // TILE_ROWS * work.item_bytes(1)
        x = self.stages * self.tokens * 128
        out = rows * max(32, self.tokens * (1 if work.gated else 2))
        return weights + x + out + _BARRIER_BYTES


def steps(work: Work) -> int:
    """Steps in padded K."""
    return -(-work.k // STEP_K)


def row_pairs(work: Work) -> int:
    """Pairs of tiles of rows: gated, 128 rows of each of gate and up."""
    return -(-work.n // (2 * ROWS))


def make_plan(work: Work, tokens: int, block_bytes: int) -> MoeGemmPlan:
    """The plan of a product with tiles of so many tokens.

    Args:
        block_bytes: max shared memory of a CTA.

    Raises:
        ValueError: a GPU with less shared memory than SM90.
    """
    for ctas in range(MAX_CTAS[tokens], 0, -1):
        room = (block_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES
        plans = [
            plan
            for weight_slots in range(2, _MAX_SLOTS + 1)
            for stages in _stages(tokens, ctas, weight_slots)
            if (plan := MoeGemmPlan(tokens, weight_slots, stages, ctas))
            and plan.shared_bytes(work) <= room
        ]
        if plans:
            return max(plans, key=_preference)
    raise ValueError(f"{block_bytes} bytes of shared memory have no room for {tokens} tokens")


def _stages(tokens: int, ctas: int, weight_slots: int) -> range:
    if tokens == NARROW:
        return range(2 * weight_slots, 2 * weight_slots + 1)
    return range(_MIN_STAGES[ctas], _MAX_STAGES + 1, 2)


def _preference(plan: MoeGemmPlan) -> tuple[int, ...]:
    stages = _MAX_STAGES if plan.tokens <= ROWS // 2 else _MAX_STAGES * 2 // 3
    slots = min(plan.weight_slots, _SLOTS[plan.tokens])
    return slots, min(plan.stages, stages), plan.weight_slots, plan.stages


def max_rows(num_pairs: int, num_experts: int) -> int:
    """Max rows of sorted pairs, with those between experts."""
    padding = (STRIP - 1) * min(num_pairs, num_experts)
    return -(-(num_pairs + padding) // STRIP) * STRIP


def max_tiles(num_pairs: int, num_experts: int, tokens: int) -> int:
    """Max tiles of any routing: every expert that is hit may have one that is not full."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // tokens


@lru_cache(maxsize=4096)
def choose_tokens(works: tuple[Work, ...], num_pairs: int, block_bytes: int, num_sms: int) -> int:
    """Tokens of a tile for both products, by their estimated time."""

    def microseconds(tokens: int) -> float:
        tiles, column = _mean_tiles(num_pairs, works[0].num_experts, tokens)
        took = 0.0
        for work in works:
            plan = make_plan(work, tokens, block_bytes)
            waves = max(1.0, tiles * row_pairs(work) / (num_sms // 2))
            factor = 1.0 if plan.ctas == 1 else _OF_MORE_CTAS
            took += waves * (steps(work) + _TILE_STEPS) * column / tiles * factor
        return took

    allowed = [tokens for tokens in TOKENS if tokens > NARROW or num_pairs <= MAX_NARROW_PAIRS]
    return min(allowed, key=microseconds)


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
