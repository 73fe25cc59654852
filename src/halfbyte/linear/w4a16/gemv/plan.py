"""How the work of `gemv.cu` is cut up: a choice among a few ways by what they should take.

Every CTA has a range of rows and a share of K: its x lies in shared memory and is read from the
second-level cache, so that the more CTAs share a range of rows (`split`), the less of x each has
to read, but their sums must be joined. A way's time is a sum of simple terms (`_Costs`).
"""

from collections.abc import Iterator
from functools import lru_cache
from math import hypot
from typing import NamedTuple

from halfbyte.linear.w4a16.packed_weight import TILE_K, TILE_N

UNIT_ROWS = 32
"""Rows of a unit, which one warp works on."""
MOST_K = 2**16
"""For which there are plans on every GPU."""
_SPLITS = (1, 2, 4, 8)
"""CTAs that share a range of rows."""
_MORE_SPLITS = (16, 32)
"""The same, where not even `_SMALLEST_SHAPE` has room for its share of x otherwise."""
PAIR = 2
"""CTAs of a cluster: larger ones start later, and do not fill a GPU."""

ROWS = (1, 8, 16, 32, 64)
"""Numbers of rows of x that plans are made for; others are planned as the next larger one, or as
the last, so that few kernels need to be compiled."""

_COLUMN_TILES = (1, 2, 4)
_MOST_STAGES = 3
_ITEM_BYTES = 2304
_SLOT_BYTES = 1024
"""Of a unit's sums, per tile of 8 columns."""
_BARRIER_BYTES = 128
_PIECES_OF_X = 8
_RESERVED_BYTES = 1024
"""Of shared memory, per CTA, by the system."""
_INVARIANT_ROWS = 16
"""Rows of x for which batch-invariant work is planned, whatever their number."""

_Shapes = tuple[tuple[tuple[int, int, int], ...], ...]
_SHAPES_OF_CTAS: _Shapes = (
    ((16, 2, 1), (16, 1, 1), (12, 2, 1), (8, 2, 1), (8, 1, 2)),
    ((16, 1, 1), (12, 2, 1), (12, 1, 1), (8, 2, 1), (8, 1, 2)),
    ((16, 1, 1), (8, 2, 1), (8, 1, 2)),
)
"""By `join`: warps, stages and CTAs on a multiprocessor, of those that were measured."""
_SMALLEST_SHAPE = (8, 1, 1)
"""Where none of them fits into shared memory."""
_MOST_TILES = 32
"""Column tiles of all warps on a multiprocessor; beyond, nothing was gained."""


class _Costs(NamedTuple):
    """µs per unit of what a multiprocessor has to do.

    Fitted to times in a graph of many calls, weights rotated, on one H200: 270 ways for eight
    shapes of weights (1,024 to 28,672 rows, K = 4,096 to 28,672) and 1, 8 and 16 rows of x, the
    order of the fastest above all. (Pairs with 16 warps and up to 8 rows were counted with the 0.14
    less that a later change took off them.) In 18 of 20 cases the one chosen is within 1.3 % of the
    best; in the others it takes 3 and 6 % more.
    """

    launch: float = 1.41
    warp: float = 0.001
    """To start a warp."""
    stream: float = 29.6e-6
    """Per byte of weights, if all multiprocessors read (4.46 TB/s)."""
    latency: float = 0.345
    """From asking for an item of weights until it is there, as far as reads do not overlap."""
    item: float = 0.0385
    """Unpacking 32 rows x 128 k."""
    tile: float = 0.0162
    """Multiplying an item with 8 columns."""
    wait: float = 0.025
    """The same, but for each item of a warp: what the other warps do not hide."""
    x: float = 2.56e-6
    """Per byte of x in a CTA, which delays the products."""
    ahead: float = 0.0291
    """Per item of weights that is asked for at first, which keeps x waiting."""
    column: tuple[float, float, float] = (0.067, 0.045, 0.044)
    """Per column of a unit that a warp joins, by `join`."""
    round: float = 0.883
    """Of units that are joined together."""
    cluster: float = 0.248
    """Per round of a join as a cluster."""
    second: float = 0.28
    """Of the second kernel of a join through memory."""
    partial: float = 14.3e-6
    """Per byte of the sums that it reads."""


_COSTS = _Costs()


class Machine(NamedTuple):
    """What a plan depends on, besides the work."""

    capability: int
    """As `dispatch` counts."""
    block_bytes: int
    """Shared memory that a CTA may have."""
    multiprocessors: int
    pairs: int
    """Clusters of two CTAs, one to a multiprocessor, that run at a time; 0 before SM90."""

    def at_once(self, split: int, join: int, ctas: int) -> int:
        """Groups that run at the same time, with so many CTAs to a multiprocessor."""
        return self.pairs * ctas if join == 1 else self.multiprocessors * ctas // split

    def bytes_of_cta(self, ctas: int) -> int:
        """Shared memory that a CTA may have where so many share a multiprocessor's."""
        return (self.block_bytes + _RESERVED_BYTES) // ctas - _RESERVED_BYTES


class FewPlan(NamedTuple):
    """One way; see the macros of `gemv.cu`."""

    column_tiles: int
    split: int
    join: int
    groups: int
    warps: int = 16
    stages: int = 1
    ctas: int = 1
    round_units: int = 1

    @property
    def columns(self) -> int:
        """Rows of x that pass at a time."""
        return 8 * self.column_tiles

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

    def macros_of_shape(self, n: int, k: int, m: int) -> tuple[tuple[str, int], ...]:
        """What the kernel may be compiled with as well, so that it need not divide."""
        return (
            ("UNITS", row_units(n)),
            ("BLOCKS", k_blocks(k)),
            ("GROUPS", self.groups),
            ("ROUND_UNITS", self.round_units),
            ("SINGLE", int(m == 1)),
        )

    def rows_of_box(self, m: int) -> int:
        """Rows of x in a box of shared memory."""
        return 1 if m == 1 else self.columns

    def piece_blocks(self, k: int) -> int:
        """Blocks of k of x that TMA brings at a time."""
        return -(-k_blocks(k) // (self.split * _PIECES_OF_X))

    def passes(self, m: int) -> int:
        """Times that the weights are read."""
        return -(-m // self.columns)

    def ctas_in_grid(self, m: int) -> int:
        """CTAs to launch for m rows of x."""
        return self.passes(m) * self.groups * self.split

    def units(self, n: int) -> int:
        """Of the CTA that has most."""
        return -(-row_units(n) // self.groups)

    def shared_bytes(self, n: int, k: int, m: int) -> int:
        """Shared memory of a CTA."""
        blocks, piece = -(-k_blocks(k) // self.split), self.piece_blocks(k)
        rows, units = self.rows_of_box(m), min(self.round_units, self.units(n))
        return (
            rows * -(-blocks // piece) * piece * TILE_K * 2
            + _BARRIER_BYTES
            + self.warps * self.stages * _ITEM_BYTES
            + (self.warps + units - 1) * self.column_tiles * _SLOT_BYTES
        )

    def microseconds(self, n: int, k: int, m: int, machine: Machine) -> float:
        """What it should take, one of many in a graph."""
        c, multiprocessors = _COSTS, machine.multiprocessors
        columns, units = min(m, self.columns), self.units(n)
        blocks = -(-k_blocks(k) // self.split)
        grid = self.passes(m) * self.groups
        waves = -(-grid // machine.at_once(self.split, self.join, self.ctas))
        resident = min(self.ctas, -(-grid * self.split // multiprocessors))
        rounds = -(-units // self.round_units)
        # In a round the warp with most items decides.
        items = -(-min(self.round_units, units) * blocks // self.warps) * rounds
        side_by_side = self.warps * resident * (c.item + c.tile * self.column_tiles)
        work = items * waves * (side_by_side + c.wait * self.column_tiles)
        ahead = self.stages * self.warps * resident
        read = hypot(
            self.passes(m) * row_units(n) * k_blocks(k) * _ITEM_BYTES / multiprocessors * c.stream,
            units * blocks * resident * waves / ahead * c.latency,
        )
        x = columns * blocks * TILE_K * 2 * resident * waves
        join = waves * (
            units * columns / self.warps * c.column[self.join]
            + rounds * (c.round + (c.cluster if self.join == 1 else 0))
        )
        if self.joins_through_memory:
            partial = self.split * m * row_units(n) * UNIT_ROWS * 4
            join += c.second + partial / multiprocessors * c.partial
        start = self.warps * resident * waves * c.warp + x * c.x + ahead * c.ahead
        return c.launch + start + max(read, work) + join


def row_units(n: int) -> int:
    """Units of 32 rows in N padded."""
    return -(-n // TILE_N) * (TILE_N // UNIT_ROWS)


def k_blocks(k: int) -> int:
    """Blocks of 128 k in K padded."""
    return -(-k // TILE_K)


def few_plan(n: int, k: int, m: int, machine: Machine, batch_invariant: bool = False) -> FewPlan:
    """The way that should take the least time.

    Args:
        n, k: of the weight.
        m: rows of x, any number.
        machine: what it is for.
        batch_invariant: the order of sums must be the same for every m, so all but the number of
            columns at a time and of stages is planned for up to 16 rows alike.

    Raises:
        ValueError: K is too large for the GPU's shared memory; it is not up to `MOST_K`.
    """
    m = next((rows for rows in ROWS if rows >= m), ROWS[-1])
    return _few_plan(n, k, m, machine, batch_invariant)


@lru_cache(maxsize=4096)
def _few_plan(n: int, k: int, m: int, machine: Machine, batch_invariant: bool) -> FewPlan:
    """`few_plan` for a number of rows in `ROWS`: a prompt of a new length plans nothing anew."""
    if not batch_invariant:
        return min(_plans(n, k, m, machine), key=lambda p: p.microseconds(n, k, m, machine))
    plan = _invariant_plan(n, k, machine)
    variants = list(_variants(plan, n, k, m, machine))
    return min(variants, key=lambda p: p.microseconds(n, k, m, machine))


@lru_cache(maxsize=4096)
def _invariant_plan(n: int, k: int, machine: Machine) -> FewPlan:
    """The way that is best for the numbers of rows up to `_INVARIANT_ROWS` together."""

    def microseconds(plan: FewPlan) -> float:
        rows = [m for m in ROWS if m <= _INVARIANT_ROWS]
        return sum(
            min(p.microseconds(n, k, m, machine) for p in _variants(plan, n, k, m, machine))
            for m in rows
        )

    return min(_plans(n, k, _INVARIANT_ROWS, machine), key=microseconds)


def _variants(plan: FewPlan, n: int, k: int, m: int, machine: Machine) -> list[FewPlan]:
    """Ways with a plan's order of sums, itself included; of the measured ones, if any is left."""
    variants = [
        variant
        for tiles in _COLUMN_TILES
        for stages in range(1, _MOST_STAGES + 1)
        for variant in (plan._replace(column_tiles=tiles, stages=stages),)
        if tiles <= min(_wanted_tiles(m), _MOST_TILES // (plan.warps * plan.ctas))
        and variant.shared_bytes(n, k, m) <= machine.bytes_of_cta(plan.ctas)
    ]
    shapes = _SHAPES_OF_CTAS[plan.join]
    return [p for p in variants if (p.warps, p.stages, p.ctas) in shapes] or variants


def _wanted_tiles(m: int) -> int:
    return next((tiles for tiles in _COLUMN_TILES if 8 * tiles >= m), _COLUMN_TILES[-1])


def _plans(n: int, k: int, m: int, machine: Machine) -> list[FewPlan]:
    small: _Shapes = ((_SMALLEST_SHAPE,),) * 3
    for shapes, splits in ((_SHAPES_OF_CTAS, _SPLITS), (small, _SPLITS), (small, _MORE_SPLITS)):
        if plans := list(_plans_of(shapes, splits, n, k, m, machine)):
            return plans
    raise ValueError(f"k={k}: needs more shared memory than the GPU's {machine.block_bytes}")


def _plans_of(
    shapes: _Shapes, splits: tuple[int, ...], n: int, k: int, m: int, machine: Machine
) -> Iterator[FewPlan]:
    for split, join in _splits_and_joins(splits, k, machine):
        for tiles in _COLUMN_TILES:
            for warps, stages, ctas in shapes[join]:
                if tiles <= min(_wanted_tiles(m), _MOST_TILES // (warps * ctas)):
                    groups = _even_groups(n, machine.at_once(split, join, ctas))
                    plan = FewPlan(tiles, split, join, groups, warps, stages, ctas)
                    fitted = _fitted(plan, n, k, m, machine.bytes_of_cta(ctas))
                    if fitted:
                        yield fitted


def _even_groups(n: int, most: int) -> int:
    """As few groups as have no more units each than `most` would have: often all have as many."""
    units = row_units(n)
    return -(-units // -(-units // most))


def _splits_and_joins(
    splits: tuple[int, ...], k: int, machine: Machine
) -> Iterator[tuple[int, int]]:
    for split in splits:
        joins = (0,) if split == 1 else (1, 2) if split == PAIR and machine.pairs else (2,)
        if split <= k_blocks(k) and split <= machine.multiprocessors:
            for join in joins:
                yield split, join


def _fitted(plan: FewPlan, n: int, k: int, m: int, limit: int) -> FewPlan | None:
    """The plan with as few rounds as fit into shared memory; None if not even one unit does."""
    units = plan.units(n)
    most = next(
        (
            most
            for most in range(units, 0, -1)
            if plan._replace(round_units=most).shared_bytes(n, k, m) <= limit
        ),
        0,
    )
    return plan._replace(round_units=-(-units // -(-units // most))) if most > 0 else None
