"""Plans of `gemm.cu`: the tile size, and which tiles are split along k (stream-K)."""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from halfbyte.linear.w4a16.packed_weight import TILE_K

GROUP_ROWS = 64
"""Rows of W per warpgroup."""


class Tile(NamedTuple):
    """A CTA's tile of the output; the two CTAs of a cluster share their tokens."""

    groups: int
    """Warpgroups that multiply, 64 rows of W each."""
    tokens: int
    """Max tokens (M) of a tile."""
    step: int
    """k per step of the main loop."""
    stages: int
    """Steps in the ring of shared memory."""
    step_microseconds: float
    """Time of a step, measured on an H200 with a tile for every CTA: from the difference between
    K = 14336 and K = 4096 in a CUDA graph of many calls."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"

    @property
    def rows(self) -> int:
        """Rows of W."""
        return GROUP_ROWS * self.groups

    @property
    def values_of_pair(self) -> int:
        """Values of the output in the tiles of a cluster's two CTAs."""
        return 2 * self.rows * self.tokens

    def row_pairs(self, n: int) -> int:
        """Pairs of tiles along n rows of W."""
        return -(-n // (2 * self.rows))

    def pairs(self, n: int, m: int) -> int:
        """Pairs of tiles for n rows of W and m tokens."""
        return self.row_pairs(n) * -(-m // self.tokens)


_TILES = (
    # groups, tokens, step, stages, step_microseconds
    (1, 64, 128, 8, 0.311),
    (1, 80, 128, 7, 0.342),
    (1, 96, 128, 6, 0.374),
    (1, 112, 128, 6, 0.44),
    (1, 128, 128, 5, 0.445),
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
"""Most tiles that registers have room for; a fine choice of sizes keeps padding of M small.

Those of one warpgroup are for small weights, where larger tiles leave SMs without work. Their steps
took 0.293, 0.353 and 0.420 µs with 64, 96 and 128 tokens. The times above are some 6 % longer, so
that plans choose the faster tile in most cases of `benchmarks/results/linear_tiles.json`, and
elsewhere one that takes at most 5 % more."""
SWIGLU_TILES = tuple(tile for tile in TILES if tile.groups == 2)
"""Tiles of the kernel with SwiGLU: one warpgroup for gate, one for up."""
STRIP = 16
"""Tokens that a cluster finishes at a time; tiles have a multiple of it."""
_CROSSING_K = 128
"""Cost of switching to another tile (storing sums, starting anew), in k that take as long."""
_EXCHANGE_MICROSECONDS = 0.8
"""Fixed cost of a join: to store sums, raise flags and see those of the other clusters."""
_SHARER_MICROSECONDS = 0.33
"""To load the sums of one more cluster; they are added one after another, in order of k."""
_JOIN_BYTES_PER_MICROSECOND = 4.2e6
"""Rate at which all clusters together store and load sums, through L2."""
_CACHED_BYTES = 4e7
"""Bytes of x that stay in the L2 of an H200 between reads by different clusters."""
_SCATTERED_BYTES_PER_MICROSECOND = 3.5e6
"""Rate of reads of W and x where x does not stay in L2: from the times of M = 4,096 with 4096 x
14336 and half of the tiles cut, and of M = 2,048 with none cut."""
_MIN_K = 256
"""Min k of a cluster's part."""
MAX_SHARERS = 32
"""Max clusters that share a tile."""


class GemmPlan(NamedTuple):
    """A split of the work over clusters."""

    tile: Tile
    tiles: int
    """Pairs of tiles over all clusters, padded where clusters idle in the last wave."""
    clusters: int
    """Clusters of two CTAs."""
    cut_tiles: int
    """Pairs that are split along k, so that all clusters have equal work."""
    crossing: int = 0
    """Cost of starting a tile, in steps; subtracted for each tile that starts in a span."""

    def steps(self, k: int) -> int:
        """Steps in padded K."""
        return -(-k // TILE_K) * (TILE_K // self.tile.step)

    def sharers(self, steps: int) -> tuple[int, ...]:
        """Number of clusters that share each cut tile (`Join` of `work.cuh`)."""
        line = steps + self.crossing
        places = self.cut_tiles * line

        def cluster_at(place: int) -> int:
            return ((place + 1) * self.clusters - 1) // places

        return tuple(
            cluster_at((tile + 1) * line - 1) - cluster_at(tile * line + self.crossing) + 1
            for tile in range(self.cut_tiles)
        )

    def microseconds(self, k: int, m: int) -> float:
        """Estimated time, without the costs that all plans have in common.

        Args:
            k: of the weight.
            m: tokens.
        """
        steps, step = self.steps(k), self.tile.step_microseconds
        whole = (self.tiles - self.cut_tiles) // self.clusters * steps * step
        cut = -(-self.cut_tiles * (steps + self.crossing) // self.clusters) * step
        if self.crossing and 2 * m * k > _CACHED_BYTES:
            # Clusters work at different k, so that x is not shared through L2.
            cut = max(cut, self._bytes_of_cut_tiles(k) / _SCATTERED_BYTES_PER_MICROSECOND)
        took = whole + cut
        sharers = self.sharers(steps)
        if parts := sum(sharers) - self.cut_tiles:
            joined = 2 * parts * self.tile.values_of_pair * 4  # stored and loaded
            took += _EXCHANGE_MICROSECONDS + joined / _JOIN_BYTES_PER_MICROSECOND
            took += _SHARER_MICROSECONDS * (max(sharers) - 1)
        return took

    def _bytes_of_cut_tiles(self, k: int) -> float:
        """Bytes of W and x that the cut tiles read, counted once for every tile that reads them."""
        return self.cut_tiles * k * (2 * self.tile.tokens + 2 * self.tile.rows * 9 / 16)


def make_plan(
    n: int, k: int, m: int, num_sms: int, tile: Tile | None = None, *, swiglu: bool = False
) -> GemmPlan:
    """The plan with the lowest estimated time.

    Args:
        n: rows of W.
        tile: by default the tile of `TILES` with the fastest plan.
        swiglu: whether the kernel applies SwiGLU.
    """
    k = -(-k // TILE_K) * TILE_K
    m = -(-m // STRIP) * STRIP  # rounded up: fewer cached plans
    return _make_plan(n, k, m, num_sms, (tile,) if tile else SWIGLU_TILES if swiglu else TILES)


@lru_cache(maxsize=4096)
def _make_plan(n: int, k: int, m: int, num_sms: int, among: tuple[Tile, ...]) -> GemmPlan:
    bounds = {tile: _min_microseconds(tile, n, k, m, num_sms) for tile in among}
    best, best_microseconds = None, inf
    for tile in sorted(among, key=lambda tile: bounds[tile]):
        if bounds[tile] >= best_microseconds:
            break
        for plan in _candidates(tile, n, k, m, num_sms):
            microseconds = plan.microseconds(k, m)
            if microseconds < best_microseconds:
                best, best_microseconds = plan, microseconds
    assert best is not None
    return best


def _min_microseconds(tile: Tile, n: int, k: int, m: int, num_sms: int) -> float:
    """Lower bound for plans with a tile: no cluster idles and no sums are joined."""
    return tile.pairs(n, m) * (k // tile.step) / (num_sms // 2) * tile.step_microseconds


def _candidates(tile: Tile, n: int, k: int, m: int, num_sms: int) -> Iterator[GemmPlan]:
    tiles = tile.pairs(n, m)
    steps = k // tile.step
    min_steps = max(_MIN_K // tile.step, -(-steps // (MAX_SHARERS - 2)))
    clusters = min(num_sms // 2, -(-tiles * steps // min_steps))
    last = tiles % clusters
    # Either the tiles of the last two waves are cut, or none and clusters idle in the last wave.
    cut_tiles = clusters * (tiles > clusters) + last
    yield GemmPlan(tile, tiles, clusters, cut_tiles, _CROSSING_K // tile.step)
    yield GemmPlan(tile, -(-tiles // clusters) * clusters, clusters, 0)
    # All tiles are cut, and every cluster has a part of one tile only.
    for sharers in range(1, clusters // tiles + 1):
        yield GemmPlan(tile, tiles, sharers * tiles, tiles * (sharers > 1))


@lru_cache(maxsize=4096)
def max_sharers(plan: GemmPlan, steps: int) -> int:
    return max(plan.sharers(steps), default=0)
