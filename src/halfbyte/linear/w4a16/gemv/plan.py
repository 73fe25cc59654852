"""Plans of `gemv.cu`: how the work is split over CTAs, chosen by estimated time.

Every CTA has a range of rows of W and a part of K (split-K). It keeps its part of x in shared
memory, read from L2: the more CTAs share a range of rows (`split`), the less of x each reads, but
their partial sums must be joined. The estimate is a sum of simple terms (`_Costs`).
"""

from collections.abc import Iterator
from functools import lru_cache
from math import hypot
from typing import NamedTuple

from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES
from halfbyte.linear.w4a16.packed_weight import TILE_K, TILE_N

UNIT_ROWS = 32
"""Rows of W in a unit, the work of one warp."""
MAX_K = 2**16
"""Max K; every GPU has plans up to it."""
_SPLITS = (1, 2, 4, 8)
"""CTAs that share a range of rows of W (split-K)."""
_MORE_SPLITS = (16, 32)
"""Used where x does not fit into shared memory with `_SPLITS`, even in `_SMALLEST_SHAPE`."""
PAIR = 2
"""CTAs of a cluster. Larger clusters start later and leave SMs idle."""

PLANNED_M = (1, 8, 16, 32, 64)
"""Values of M that have plans; any other M uses the plan of the next larger one, or of the last.
This bounds the number of compiled kernels."""

_COLUMN_TILES = (1, 2, 4)
_MAX_STAGES = 3
_ITEM_BYTES = 2304
_SLOT_BYTES = 1024
"""Bytes of a unit's sums, per tile of 8 columns (tokens)."""
_BARRIER_BYTES = 128
_X_SLICES = 8
_INVARIANT_M = 16
"""Max M for which batch-invariant plans are optimized; they are used for every M."""

_Shapes = tuple[tuple[tuple[int, int, int], ...], ...]
_SHAPES_OF_CTAS: _Shapes = (
    ((16, 2, 1), (16, 1, 1), (12, 2, 1), (8, 2, 1), (8, 1, 2)),
    ((16, 1, 1), (12, 2, 1), (12, 1, 1), (8, 2, 1), (8, 1, 2)),
    ((16, 1, 1), (8, 2, 1), (8, 1, 2)),
)
"""By `join`: (warps, stages, CTAs per SM), the configurations that were measured."""
_SMALLEST_SHAPE = (8, 1, 1)
"""Fallback where none of them fits into shared memory."""
_MAX_TILES = 32
"""Max column tiles of all warps on an SM; more were not faster."""


class _Costs(NamedTuple):
    """Costs in µs of the work of one SM.

    Fitted to times of CUDA graphs with many calls and rotated weights on one H200: 270 plans for
    eight weight shapes (N = 1,024 to 28,672, K = 4,096 to 28,672) and M = 1, 8 and 16, so that the
    fastest plans are ranked correctly. In 18 of 20 cases the chosen plan is within 1.3 % of the
    best; in the others it takes 3 and 6 % longer. (Times of clusters with 16 warps per CTA and M
    up to 8 were measured before a change that saved 0.14 µs; these were subtracted.)
    """

    launch: float = 1.41
    warp: float = 0.001
    """Per warp that starts."""
    stream: float = 29.6e-6
    """Per byte of weights, with all SMs reading (4.46 TB/s)."""
    latency: float = 0.345
    """Memory latency of an item of weights, as far as reads do not overlap."""
    item: float = 0.0385
    """To unpack an item (32 rows x 128 k)."""
    tile: float = 0.0162
    """To multiply an item by 8 columns."""
    wait: float = 0.025
    """Per item of one warp and 8 columns: the part of its time that other warps do not hide."""
    x: float = 2.56e-6
    """Per byte of x that a CTA loads before it can multiply."""
    ahead: float = 0.0291
    """Per item of weights that is prefetched before x, and so delays x."""
    column: tuple[float, float, float] = (0.067, 0.045, 0.044)
    """To join one column of a unit, per warp, by `join`."""
    round: float = 0.883
    """Per round (units that are joined together)."""
    cluster: float = 0.248
    """Added per round where the join is a cluster's."""
    second: float = 0.28
    """Of the second kernel, where the join goes through memory."""
    partial: float = 14.3e-6
    """Per byte of partial sums that it reads."""


_COSTS = _Costs()


class Gpu(NamedTuple):
    """Limits of a GPU, as its driver reports them, that plans of CUDA C++ kernels depend on."""

    compute_capability: int
    """Compute capability as in `dispatch`, such as 90."""
    block_bytes: int
    """Max shared memory of a CTA."""
    num_sms: int
    max_clusters: int
    """Max resident clusters of two CTAs, one CTA per SM; 0 before SM90."""

    def at_once(self, split: int, join: int, ctas: int) -> int:
        """Groups that are resident at a time, with `ctas` CTAs per SM."""
        return self.max_clusters * ctas if join == 1 else self.num_sms * ctas // split

    def bytes_of_cta(self, ctas: int) -> int:
        """Max shared memory of a CTA, with `ctas` CTAs per SM."""
        return (self.block_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES


class GemvPlan(NamedTuple):
    """A split of the work; the fields are macros of `gemv.cu`."""

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
        """Tokens per pass over the weights."""
        return 8 * self.column_tiles

    @property
    def joins_through_memory(self) -> bool:
        """Whether a second kernel adds the partial sums."""
        return self.join == 2

    def macros(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel, besides the dtype's."""
        return (
            ("COLUMN_TILES", self.column_tiles),
            ("SPLIT", self.split),
            ("JOIN", self.join),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
        )

    def macros_of_shape(self, n: int, k: int, m: int) -> tuple[tuple[str, int], ...]:
        """Macros of the shape: with them the kernel needs no divisions at run time."""
        return (
            ("UNITS", row_units(n)),
            ("BLOCKS", k_blocks(k)),
            ("GROUPS", self.groups),
            ("ROUND_UNITS", self.round_units),
            ("SINGLE", int(m == 1)),
        )

    def tokens_of_box(self, m: int) -> int:
        """Tokens in a TMA box of x."""
        return 1 if m == 1 else self.columns

    def slice_blocks(self, k: int) -> int:
        """Blocks of 128 k in a slice of x, which TMA loads at a time."""
        return -(-k_blocks(k) // (self.split * _X_SLICES))

    def passes(self, m: int) -> int:
        """How often the weights are read."""
        return -(-m // self.columns)

    def ctas_in_grid(self, m: int) -> int:
        """CTAs to launch for m tokens."""
        return self.passes(m) * self.groups * self.split

    def units(self, n: int) -> int:
        """Max units of a CTA."""
        return -(-row_units(n) // self.groups)

    def shared_bytes(self, n: int, k: int, m: int) -> int:
        """Bytes of shared memory of a CTA."""
        blocks, slice_blocks = -(-k_blocks(k) // self.split), self.slice_blocks(k)
        rows, units = self.tokens_of_box(m), min(self.round_units, self.units(n))
        return (
            rows * -(-blocks // slice_blocks) * slice_blocks * TILE_K * 2
            + _BARRIER_BYTES
            + self.warps * self.stages * _ITEM_BYTES
            + (self.warps + units - 1) * self.column_tiles * _SLOT_BYTES
        )

    def microseconds(self, n: int, k: int, m: int, gpu: Gpu) -> float:
        """Estimated time of a call within a CUDA graph."""
        c, num_sms = _COSTS, gpu.num_sms
        columns, units = min(m, self.columns), self.units(n)
        blocks = -(-k_blocks(k) // self.split)
        grid = self.passes(m) * self.groups
        waves = -(-grid // gpu.at_once(self.split, self.join, self.ctas))
        resident = min(self.ctas, -(-grid * self.split // num_sms))
        rounds = -(-units // self.round_units)
        # The warp with the most items decides how long a round takes.
        items = -(-min(self.round_units, units) * blocks // self.warps) * rounds
        side_by_side = self.warps * resident * (c.item + c.tile * self.column_tiles)
        work = items * waves * (side_by_side + c.wait * self.column_tiles)
        ahead = self.stages * self.warps * resident
        read = hypot(
            self.passes(m) * row_units(n) * k_blocks(k) * _ITEM_BYTES / num_sms * c.stream,
            units * blocks * resident * waves / ahead * c.latency,
        )
        x = columns * blocks * TILE_K * 2 * resident * waves
        join = waves * (
            units * columns / self.warps * c.column[self.join]
            + rounds * (c.round + (c.cluster if self.join == 1 else 0))
        )
        if self.joins_through_memory:
            partial = self.split * m * row_units(n) * UNIT_ROWS * 4
            join += c.second + partial / num_sms * c.partial
        start = self.warps * resident * waves * c.warp + x * c.x + ahead * c.ahead
        return c.launch + start + max(read, work) + join


def row_units(n: int) -> int:
    """Units of 32 rows in N padded."""
    return -(-n // TILE_N) * (TILE_N // UNIT_ROWS)


def k_blocks(k: int) -> int:
    """Blocks of 128 k in K padded."""
    return -(-k // TILE_K)


def make_plan(n: int, k: int, m: int, gpu: Gpu, batch_invariant: bool = False) -> GemvPlan:
    """The plan with the lowest estimated time.

    Args:
        n, k: of the weight.
        m: tokens, any number.
        gpu: what plans depend on.
        batch_invariant: the order of summation must be the same for every m: only the number of
            column tiles and of stages may depend on m, the rest is optimized for M up to 16.

    Raises:
        ValueError: x does not fit into the GPU's shared memory; cannot happen up to `MAX_K`.
    """
    m = next((rows for rows in PLANNED_M if rows >= m), PLANNED_M[-1])
    return _make_plan(n, k, m, gpu, batch_invariant)


@lru_cache(maxsize=4096)
def _make_plan(n: int, k: int, m: int, gpu: Gpu, batch_invariant: bool) -> GemvPlan:
    """`make_plan` for m in `PLANNED_M`, so that a new prompt length hits the cache."""
    if not batch_invariant:
        return min(_plans(n, k, m, gpu), key=lambda p: p.microseconds(n, k, m, gpu))
    plan = _invariant_plan(n, k, gpu)
    variants = list(_variants(plan, n, k, m, gpu))
    return min(variants, key=lambda p: p.microseconds(n, k, m, gpu))


@lru_cache(maxsize=4096)
def _invariant_plan(n: int, k: int, gpu: Gpu) -> GemvPlan:
    """The plan with the least total time over `PLANNED_M` up to `_INVARIANT_M`."""

    def microseconds(plan: GemvPlan) -> float:
        rows = [m for m in PLANNED_M if m <= _INVARIANT_M]
        return sum(
            min(p.microseconds(n, k, m, gpu) for p in _variants(plan, n, k, m, gpu)) for m in rows
        )

    return min(_plans(n, k, _INVARIANT_M, gpu), key=microseconds)


def _variants(plan: GemvPlan, n: int, k: int, m: int, gpu: Gpu) -> list[GemvPlan]:
    """Plans with the same order of summation, `plan` included; only measured ones if any fit."""
    variants = [
        variant
        for tiles in _COLUMN_TILES
        for stages in range(1, _MAX_STAGES + 1)
        for variant in (plan._replace(column_tiles=tiles, stages=stages),)
        if tiles <= min(_wanted_tiles(m), _MAX_TILES // (plan.warps * plan.ctas))
        and variant.shared_bytes(n, k, m) <= gpu.bytes_of_cta(plan.ctas)
    ]
    shapes = _SHAPES_OF_CTAS[plan.join]
    return [p for p in variants if (p.warps, p.stages, p.ctas) in shapes] or variants


def _wanted_tiles(m: int) -> int:
    return next((tiles for tiles in _COLUMN_TILES if 8 * tiles >= m), _COLUMN_TILES[-1])


def _plans(n: int, k: int, m: int, gpu: Gpu) -> list[GemvPlan]:
    small: _Shapes = ((_SMALLEST_SHAPE,),) * 3
    for shapes, splits in ((_SHAPES_OF_CTAS, _SPLITS), (small, _SPLITS), (small, _MORE_SPLITS)):
        if plans := list(_plans_of(shapes, splits, n, k, m, gpu)):
            return plans
    raise ValueError(f"k={k}: needs more shared memory than the GPU's {gpu.block_bytes}")


def _plans_of(
    shapes: _Shapes, splits: tuple[int, ...], n: int, k: int, m: int, gpu: Gpu
) -> Iterator[GemvPlan]:
    for split, join in _splits_and_joins(splits, k, gpu):
        for tiles in _COLUMN_TILES:
            for warps, stages, ctas in shapes[join]:
                if tiles <= min(_wanted_tiles(m), _MAX_TILES // (warps * ctas)):
                    groups = _even_groups(n, gpu.at_once(split, join, ctas))
                    plan = GemvPlan(tiles, split, join, groups, warps, stages, ctas)
                    fitted = _fitted(plan, n, k, m, gpu.bytes_of_cta(ctas))
                    if fitted:
                        yield fitted


def _even_groups(n: int, max_groups: int) -> int:
    """The min number of groups whose fullest has no more units than with `max_groups`."""
    units = row_units(n)
    return -(-units // -(-units // max_groups))


def _splits_and_joins(splits: tuple[int, ...], k: int, gpu: Gpu) -> Iterator[tuple[int, int]]:
    for split in splits:
        joins = (0,) if split == 1 else (1, 2) if split == PAIR and gpu.max_clusters else (2,)
        if split <= k_blocks(k) and split <= gpu.num_sms:
            for join in joins:
                yield split, join


def _fitted(plan: GemvPlan, n: int, k: int, m: int, limit: int) -> GemvPlan | None:
    """The plan with the fewest rounds that fit into shared memory; None if one unit does not."""
    units = plan.units(n)
    max_units = next(
        (
            candidate
            for candidate in range(units, 0, -1)
            if plan._replace(round_units=candidate).shared_bytes(n, k, m) <= limit
        ),
        0,
    )
    return plan._replace(round_units=-(-units // -(-units // max_units))) if max_units > 0 else None
