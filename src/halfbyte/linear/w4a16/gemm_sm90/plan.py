"""How the work of `gemm.cu` is cut up: which tiles, and which of them along k."""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from halfbyte.linear.w4a16.packed_weight import TILE_K

GROUP_ROWS = 64
"""Of W, in a warpgroup's part of a tile."""


class Tile(NamedTuple):
    """What a CTA computes at a time, and how; a cluster of two has the same rows of x."""

    groups: int
    """Warpgroups that multiply, each for 64 rows of W."""
    tokens: int
    """Rows of x."""
    step: int
    """k at a time."""
    stages: int
    """Steps in the ring."""
    step_microseconds: float
    """As measured on an H200 with a tile for every CTA: by how much longer K = 14336 takes than
    K = 4096 in a graph of many calls."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"

    @property
    def rows(self) -> int:
        """Of W."""
        return GROUP_ROWS * self.groups

    @property
    def values_of_pair(self) -> int:
        """Of the result, in the tiles of a cluster's two CTAs."""
        return 2 * self.rows * self.tokens

    def row_pairs(self, n: int) -> int:
        """Pairs of tiles along n rows of W."""
        return -(-n // (2 * self.rows))

    def pairs(self, n: int, m: int) -> int:
        """Pairs of tiles of n rows of W and m rows of x."""
        return self.row_pairs(n) * -(-m // self.tokens)


_TILES = (
    # Warpgroups, rows of x, k at a time, stages, µs.
    (2, 64, 128, 8, 0.477),
    (2, 80, 128, 7, 0.535),
    (2, 96, 128, 6, 0.589),
    (2, 112, 128, 5, 0.657),
    (2, 128, 128, 4, 0.692),
    (2, 144, 128, 4, 0.763),
    (2, 160, 64, 7, 0.418),
    (2, 176, 64, 6, 0.455),
    (2, 192, 64, 6, 0.491),
    (2, 208, 64, 5, 0.529),
    (2, 224, 64, 5, 0.565),
    (2, 240, 64, 4, 0.603),
    (2, 256, 64, 4, 0.641),
    (3, 64, 64, 8, 0.369),
    (3, 80, 64, 8, 0.408),
    (3, 96, 64, 8, 0.444),
    (3, 112, 64, 8, 0.481),
    (3, 128, 64, 7, 0.514),
    (3, 144, 64, 6, 0.563),
    (3, 160, 64, 6, 0.618),
)
TILES = tuple(Tile(*numbers) for numbers in _TILES)
"""That plans choose among: all that registers have room for, so that few rows are padding."""
STRIP = 16
"""Rows of x of which tiles have whole numbers, and that a cluster finishes at a time."""
_CROSSING_K = 128
"""That a cluster could do while it leaves its sums of a tile and begins the next one."""
_EXCHANGE_MICROSECONDS = 0.8
"""To leave sums, tell others, and see theirs: what a join takes however little it adds."""
_SHARER_MICROSECONDS = 0.33
"""To load what another cluster has left of a tile: one after another, in order of k."""
_JOIN_BYTES_PER_MICROSECOND = 4.2e6
"""At which all clusters together leave sums and load them, through the L2 cache."""
_CACHED_BYTES = 4e7
"""Of x, that the L2 cache of an H200 keeps while others read it, too."""
_SCATTERED_BYTES_PER_MICROSECOND = 3.5e6
"""Of W and x, where it does not. By what 4,096 rows of 4096 x 14336 took with half of the tiles
cut, compared with 2,048 rows with none cut."""
_LEAST_K = 256
"""Of a cluster."""
MOST_SHARERS = 32
"""Clusters that have a part of the same tile."""


class WidePlan(NamedTuple):
    """How the work is cut up."""

    tile: Tile
    tiles: int
    """Pairs of all clusters, those that idle in the last turn counted."""
    clusters: int
    """Of two CTAs."""
    cut_tiles: int
    """Pairs whose k is cut, so that every cluster has as much to do."""
    crossing: int = 0
    """Steps that a cluster does less for every tile that begins within its span."""

    def steps(self, k: int) -> int:
        """Of k in K padded."""
        return -(-k // TILE_K) * (TILE_K // self.tile.step)

    def sharers(self, steps: int) -> tuple[int, ...]:
        """Clusters that have a part of each tile that is cut (`Join` of `work.cuh`)."""
        line = steps + self.crossing
        places = self.cut_tiles * line

        def cluster_at(place: int) -> int:
            return ((place + 1) * self.clusters - 1) // places

        return tuple(
            cluster_at((tile + 1) * line - 1) - cluster_at(tile * line + self.crossing) + 1
            for tile in range(self.cut_tiles)
        )

    def microseconds(self, k: int, m: int) -> float:
        """What it should take, but for what all plans have in common.

        Args:
            k: of the weight.
            m: rows of x.
        """
        steps, step = self.steps(k), self.tile.step_microseconds
        whole = (self.tiles - self.cut_tiles) // self.clusters * steps * step
        cut = -(-self.cut_tiles * (steps + self.crossing) // self.clusters) * step
        if self.crossing and 2 * m * k > _CACHED_BYTES:
            # Clusters are at different k, and find nothing of x that others have read.
            cut = max(cut, self._bytes_of_cut_tiles(k) / _SCATTERED_BYTES_PER_MICROSECOND)
        took = whole + cut
        sharers = self.sharers(steps)
        if parts := sum(sharers) - self.cut_tiles:
            joined = 2 * parts * self.tile.values_of_pair * 4  # left, and loaded
            took += _EXCHANGE_MICROSECONDS + joined / _JOIN_BYTES_PER_MICROSECOND
            took += _SHARER_MICROSECONDS * (max(sharers) - 1)
        return took

    def _bytes_of_cut_tiles(self, k: int) -> float:
        """Of W and x, as often as the tiles need them."""
        return self.cut_tiles * k * (2 * self.tile.tokens + 2 * self.tile.rows * 9 / 16)


def wide_plan(n: int, k: int, m: int, multiprocessors: int, tile: Tile | None = None) -> WidePlan:
    """The plan that should take least time.

    Args:
        tile: by default the one of `TILES` with the fastest plan.
    """
    k = -(-k // TILE_K) * TILE_K
    m = -(-m // STRIP) * STRIP  # plans need it no more exactly
    return _wide_plan(n, k, m, multiprocessors, (tile,) if tile else TILES)


@lru_cache(maxsize=4096)
def _wide_plan(n: int, k: int, m: int, multiprocessors: int, among: tuple[Tile, ...]) -> WidePlan:
    fewest = {tile: _fewest_microseconds(tile, n, k, m, multiprocessors) for tile in among}
    best, least = None, inf
    for tile in sorted(among, key=lambda tile: fewest[tile]):
        if fewest[tile] >= least:
            break
        for way in _ways(tile, n, k, m, multiprocessors):
            microseconds = way.microseconds(k, m)
            if microseconds < least:
                best, least = way, microseconds
    assert best is not None
    return best


def _fewest_microseconds(tile: Tile, n: int, k: int, m: int, multiprocessors: int) -> float:
    """That any plan with a tile takes: no cluster idles, and no sums are joined."""
    return tile.pairs(n, m) * (k // tile.step) / (multiprocessors // 2) * tile.step_microseconds


def _ways(tile: Tile, n: int, k: int, m: int, multiprocessors: int) -> Iterator[WidePlan]:
    tiles = tile.pairs(n, m)
    steps = k // tile.step
    least_steps = max(_LEAST_K // tile.step, -(-steps // (MOST_SHARERS - 2)))
    clusters = min(multiprocessors // 2, -(-tiles * steps // least_steps))
    last = tiles % clusters
    # All turns but the last two are whole; or all, and some clusters idle in the last.
    cut_tiles = clusters * (tiles > clusters) + last
    yield WidePlan(tile, tiles, clusters, cut_tiles, _CROSSING_K // tile.step)
    yield WidePlan(tile, -(-tiles // clusters) * clusters, clusters, 0)
    # Of every tile, and no cluster crosses over to another.
    for sharers in range(1, clusters // tiles + 1):
        yield WidePlan(tile, tiles, sharers * tiles, tiles * (sharers > 1))


@lru_cache(maxsize=4096)
def most_sharers(plan: WidePlan, steps: int) -> int:
    return max(plan.sharers(steps), default=0)
