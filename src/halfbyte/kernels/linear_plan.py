"""How the work of `linear.cu` is cut up: a choice among a few ways by what they should take.

Every CTA has a range of rows and a share of K: its x lies in shared memory and is read from the
second-level cache, so that the more CTAs share a range of rows (`split`), the less of x each has to
read, but their sums must be joined. Time is estimated from the bytes that the busiest CTA reads and
the matmuls that it does; the constants were read off an H200.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.linear_weights import TILE_K, TILE_N

UNIT_ROWS = 32
"""Rows of a unit, which one warp works on."""
SPLITS = (1, 2, 4, 8)
"""CTAs that share a range of rows."""

ROWS = (2, 8, 16, 32, 64)
"""Numbers of rows of x that plans are made for; others are planned as the next larger one, or as
the last, so that few kernels need to be compiled."""

_COLUMN_TILES = (1, 2, 4, 8)
_MOST_STAGES = 4
_ITEM_BYTES = 2304
_SLOT_BYTES = 1152
"""Of a unit's sums, per tile of 8 columns."""
_X_PADDING = 16
_INVARIANT_ROWS = 16
"""Rows of x for which batch-invariant work is planned, whatever their number."""

# Per multiprocessor and µs.
_WEIGHT_BYTES = 34e3
_X_BYTES = 50e3
_TILE_MATMULS = 1200.0
_ROUND_MICROSECONDS = 0.2
_SPLIT_MICROSECONDS = 0.4
_MEMORY_JOIN_MICROSECONDS = 2.0


class Machine(NamedTuple):
    """What a plan depends on, besides the work."""

    capability: int
    """As `dispatch` counts."""
    block_bytes: int
    """Shared memory that a CTA may have."""
    groups: tuple[int, ...]
    """For each of `SPLITS`, the groups of as many CTAs that run at the same time."""


class FewPlan(NamedTuple):
    """One way; see the macros of `linear.cu`."""

    column_tiles: int
    split: int
    join: int
    groups: int
    warps: int = 16
    stages: int = 3
    ctas: int = 1
    round_units: int = 1

    @property
    def joins_through_memory(self) -> bool:
        """Whether a second kernel adds up the parts."""
        return self.join == 2

    def macros(self) -> tuple[tuple[str, int], ...]:
        """What the kernel is compiled with, besides the dtype."""
        return (
            ("COLUMN_TILES", self.column_tiles),
            ("SPLIT", self.split),
            ("JOIN", self.join),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
        )

    def passes(self, m: int) -> int:
        """Times that the weights are read."""
        return -(-m // (8 * self.column_tiles))

    def ctas_in_grid(self, m: int) -> int:
        """CTAs to launch for m rows of x."""
        return self.passes(m) * self.groups * self.split

    def units(self, n: int) -> int:
        """Of the CTA that has most."""
        return -(-row_units(n) // self.groups)

    def shared_bytes(self, n: int, k: int, m: int) -> int:
        """Shared memory of a CTA."""
        blocks = -(-k_blocks(k) // self.split)
        return (
            self.warps * self.stages * _ITEM_BYTES
            + (self.warps + min(self.round_units, self.units(n))) * self.column_tiles * _SLOT_BYTES
            + min(m, 8 * self.column_tiles) * (blocks * TILE_K * 2 + _X_PADDING)
        )

    def microseconds(self, n: int, k: int, m: int, machine: Machine) -> float:
        """What it should take, without what every launch takes."""
        at_once = machine.groups[SPLITS.index(self.split)] * self.ctas
        waves = -(-self.groups * self.passes(m) // at_once)
        values = self.units(n) * UNIT_ROWS * k_blocks(k) * TILE_K / self.split
        weights = values * 0.5625 / _WEIGHT_BYTES
        matmuls = values / 256 * self.column_tiles / _TILE_MATMULS
        x = min(m, 8 * self.column_tiles) * k * 2 / self.split / _X_BYTES
        joins = -(-self.units(n) // self.round_units) * _ROUND_MICROSECONDS
        if self.split > 1:
            joins += _SPLIT_MICROSECONDS + 0.05 * self.split
        if self.joins_through_memory:
            joins += _MEMORY_JOIN_MICROSECONDS
        return waves * (max(weights, matmuls) + x + joins)


def row_units(n: int) -> int:
    """Units of 32 rows in N padded."""
    return -(-n // TILE_N) * (TILE_N // UNIT_ROWS)


def k_blocks(k: int) -> int:
    """Blocks of 128 k in K padded."""
    return -(-k // TILE_K)


@lru_cache(maxsize=4096)
def few_plan(n: int, k: int, m: int, machine: Machine, batch_invariant: bool = False) -> FewPlan:
    """The way that should take the least time.

    Args:
        n, k: of the weight.
        m: rows of x, any number.
        machine: what it is for.
        batch_invariant: the order of sums must be the same for every m, so all but the number of
            columns at a time is planned for 16 rows.

    Raises:
        ValueError: K is too large for the GPU's shared memory.
    """
    m = next((rows for rows in ROWS if rows >= m), ROWS[-1])
    rows = _INVARIANT_ROWS if batch_invariant else m
    plans = [plan for plan in _plans(n, k, rows, machine) if plan]
    if not plans:
        raise ValueError(f"k={k}: needs more shared memory than the GPU's {machine.block_bytes}")
    plan = min(plans, key=lambda plan: plan.microseconds(n, k, rows, machine))
    if not batch_invariant:
        return plan
    wider = (
        plan._replace(column_tiles=tiles, stages=stages)
        for tiles in reversed(_COLUMN_TILES)
        for stages in range(_MOST_STAGES, 1, -1)
        if tiles <= _wanted_tiles(m)
    )
    fitting = (plan for plan in wider if plan.shared_bytes(n, k, m) <= machine.block_bytes)
    return next(fitting, plan)


def _wanted_tiles(m: int) -> int:
    return next((tiles for tiles in _COLUMN_TILES if 8 * tiles >= m), _COLUMN_TILES[-1])


def _plans(n: int, k: int, m: int, machine: Machine) -> Iterator[FewPlan | None]:
    for split, at_once in zip(SPLITS, machine.groups, strict=True):
        if split > k_blocks(k) or not at_once:
            continue
        join = 0 if split == 1 else 1 if machine.capability >= 90 else 2
        groups = min(row_units(n), at_once)
        for tiles in _COLUMN_TILES:
            if tiles <= _wanted_tiles(m):
                for warps in (16, 8) if tiles <= 2 else (8,):
                    plan = FewPlan(tiles, split, join, groups, warps)
                    yield _fitted(plan, n, k, m, machine.block_bytes)


def _fitted(plan: FewPlan, n: int, k: int, m: int, block_bytes: int) -> FewPlan | None:
    """The plan with as few rounds as fit, then as many stages; None if not even the least does."""
    units = plan.units(n)
    for rounds in range(1, units + 1):
        round_units = -(-units // rounds)
        for stages in range(_MOST_STAGES, 1, -1):
            fitted = plan._replace(round_units=round_units, stages=stages)
            # With two stages memory waits for the arithmetic: rather more rounds.
            if (stages > 2 or round_units <= 2) and fitted.shared_bytes(n, k, m) <= block_bytes:
                return fitted
    return None
