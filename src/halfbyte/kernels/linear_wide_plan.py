"""How the work of `linear_wide.cu` is cut up: which tiles, and which of them along k."""

from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.linear_weights import TILE_K

GROUP_ROWS = 64
"""Of W, in a warpgroup's part of a tile."""


class Shape(NamedTuple):
    """Of a tile, and of the CTAs that compute it."""

    groups: int
    """Warpgroups that multiply."""
    step: int
    """k at a time."""
    stages: int
    """Steps in the ring."""
    step_microseconds: float
    """As measured on an H200."""


SHAPES = {
    64: Shape(3, 128, 6, 0.64),
    128: Shape(3, 64, 7, 0.46),
    256: Shape(2, 64, 4, 0.60),
}
"""By a tile's rows of x."""
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

    tokens: int
    """Rows of x in a tile."""
    tiles: int
    """Of all clusters, those that idle in the last turn counted."""
    clusters: int
    """Of two CTAs."""
    cut_tiles: int
    """Tiles whose k is cut, so that every cluster has as much to do."""
    crossing: int = 0
    """Steps that a cluster does less for every tile that begins within its span."""

    def steps(self, k: int) -> int:
        """Of k in K padded."""
        return -(-k // TILE_K) * (TILE_K // SHAPES[self.tokens].step)

    def sharers(self, steps: int) -> tuple[int, ...]:
        """Clusters that have a part of each tile that is cut (`Join` of `linear_wide_work.cuh`)."""
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
        steps, step = self.steps(k), SHAPES[self.tokens].step_microseconds
        whole = (self.tiles - self.cut_tiles) // self.clusters * steps * step
        cut = -(-self.cut_tiles * (steps + self.crossing) // self.clusters) * step
        if self.crossing and 2 * m * k > _CACHED_BYTES:
            # Clusters are at different k, and find nothing of x that others have read.
            cut = max(cut, self._bytes_of_cut_tiles(k) / _SCATTERED_BYTES_PER_MICROSECOND)
        took = whole + cut
        sharers = self.sharers(steps)
        if parts := sum(sharers) - self.cut_tiles:
            joined = 2 * parts * (rows_of_pair(self.tokens) * self.tokens * 4)  # left, and loaded
            took += _EXCHANGE_MICROSECONDS + joined / _JOIN_BYTES_PER_MICROSECOND
            took += _SHARER_MICROSECONDS * (max(sharers) - 1)
        return took

    def _bytes_of_cut_tiles(self, k: int) -> float:
        """Of W and x, as often as the tiles need them."""
        return self.cut_tiles * k * (2 * self.tokens + rows_of_pair(self.tokens) * 9 / 16)


def rows_of_pair(tokens: int) -> int:
    """Rows of W in the tiles of a cluster's two CTAs."""
    return 2 * GROUP_ROWS * SHAPES[tokens].groups


def wide_plan(n: int, k: int, m: int, multiprocessors: int, tokens: int | None = None) -> WidePlan:
    """The plan that should take least time.

    Args:
        tokens: rows of x in a tile, 64, 128 or 256; by default what is faster.
    """
    k = -(-k // TILE_K) * TILE_K
    m = -(-m // min(SHAPES)) * min(SHAPES)  # plans need it no more exactly
    return _wide_plan(n, k, m, multiprocessors, tokens)


@lru_cache(maxsize=4096)
def _wide_plan(n: int, k: int, m: int, multiprocessors: int, tokens: int | None) -> WidePlan:
    ways = []
    for size in (tokens,) if tokens else SHAPES:
        tiles = row_pairs(n, size) * -(-m // size)
        step = SHAPES[size].step
        steps = k // step
        least_steps = max(_LEAST_K // step, -(-steps // (MOST_SHARERS - 2)))
        clusters = min(multiprocessors // 2, -(-tiles * steps // least_steps))
        last = tiles % clusters
        # All turns but the last two are whole; or all, and some clusters idle in the last.
        cut_tiles = clusters * (tiles > clusters) + last
        ways.append(WidePlan(size, tiles, clusters, cut_tiles, _CROSSING_K // step))
        ways.append(WidePlan(size, -(-tiles // clusters) * clusters, clusters, 0))
        # Of every tile, and no cluster crosses over to another.
        for sharers in range(1, clusters // tiles + 1):
            ways.append(WidePlan(size, tiles, sharers * tiles, tiles * (sharers > 1)))
    return min(ways, key=lambda way: way.microseconds(k, m))


@lru_cache(maxsize=4096)
def most_sharers(plan: WidePlan, steps: int) -> int:
    return max(plan.sharers(steps), default=0)


def row_pairs(n: int, tokens: int) -> int:
    """Pairs of tiles of W's rows: a cluster has both."""
    return -(-n // rows_of_pair(tokens))
