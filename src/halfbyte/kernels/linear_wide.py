"""Launcher of the W4A16 kernel for many rows of x on SM90: unpacking inside a `wgmma` matmul.

Weights are in the order of `linear_weights`. See `linear_wide.cu` for how it works.
"""

import ctypes
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch

from halfbyte.kernels import nvrtc
from halfbyte.kernels.devices import Memory, allocate, multiprocessors
from halfbyte.kernels.linear_weights import TILE_K, TILE_N
from halfbyte.kernels.tensor_maps import box_rows, row_stride, tensor_map

GROUP_ROWS = 64
"""Of W, in a warpgroup's part of a tile."""


class _Shape(NamedTuple):
    """Of a tile, and of the CTAs that compute it."""

    groups: int
    """Warpgroups that multiply."""
    step: int
    """k at a time."""
    stages: int
    """Steps in the ring."""
    step_microseconds: float
    """As measured on an H200."""


_SHAPES = {
    64: _Shape(3, 128, 6, 0.64),
    128: _Shape(3, 64, 7, 0.46),
    256: _Shape(2, 64, 4, 0.60),
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
_MOST_SHARERS = 32
"""Clusters that have a part of the same tile."""
_STRIP = 16
"""Rows of x that a cluster finishes at a time."""
_ONE = 2**31
"""What inverses are scaled by; the kernel divides numbers whose product with `by` is less."""


_RAISED = count(secrets.randbits(64), 2)
"""Values that raise flags. One and the next are used by one launch, and by every replay of it,
which leaves none: so flags need no clearing, whatever lay in their memory."""


class _KnownDivisor(ctypes.Structure):
    """`KnownDivisor` of `linear_wide_work.cuh`, for numbers below `_ONE / by`."""

    _fields_ = (("by", ctypes.c_uint32), ("multiplier", ctypes.c_uint32))


class _Work(ctypes.Structure):
    """The fields of `Params` that are the same in all calls with a shape and a plan."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "blocks_n", "steps")),
        *((name, ctypes.c_int) for name in ("tiles", "cut_tiles", "crossing")),
        *((name, _KnownDivisor) for name in ("row_pairs", "line", "clusters")),
        *((name, ctypes.c_uint32) for name in ("span", "more")),
        ("clusters_per_place", ctypes.c_float),
    )


class _Params(ctypes.Structure):
    """`Params` of `linear_wide_work.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "weight_scale", "row_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("partial", "flags")),
        ("raised", ctypes.c_uint64),
        ("work", _Work),
    )


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
        return -(-k // TILE_K) * (TILE_K // _SHAPES[self.tokens].step)

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
        steps, step = self.steps(k), _SHAPES[self.tokens].step_microseconds
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
    return 2 * GROUP_ROWS * _SHAPES[tokens].groups


def wide_plan(n: int, k: int, m: int, multiprocessors: int, tokens: int | None = None) -> WidePlan:
    """The plan that should take least time.

    Args:
        tokens: rows of x in a tile, 64, 128 or 256; by default what is faster.
    """
    k = -(-k // TILE_K) * TILE_K
    m = -(-m // min(_SHAPES)) * min(_SHAPES)  # plans need it no more exactly
    return _wide_plan(n, k, m, multiprocessors, tokens)


@lru_cache(maxsize=4096)
def _wide_plan(n: int, k: int, m: int, multiprocessors: int, tokens: int | None) -> WidePlan:
    ways = []
    for size in (tokens,) if tokens else _SHAPES:
        tiles = _row_pairs(n, size) * -(-m // size)
        step = _SHAPES[size].step
        steps = k // step
        least_steps = max(_LEAST_K // step, -(-steps // (_MOST_SHARERS - 2)))
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
def _most_sharers(plan: WidePlan, steps: int) -> int:
    return max(plan.sharers(steps), default=0)


class _Launch(NamedTuple):
    """What calls with a shape have in common."""

    kernel: nvrtc.Kernel
    grid: int
    threads: int
    m: int
    k: int
    tokens: int
    """Rows of x in a tile."""
    work: _Work
    out: Memory
    workspace: Memory | None
    """None where no tile is cut, so that clusters have nothing to tell each other."""
    partial_bytes: int
    """Of the workspace's first part, sums; flags are the second."""


def linear_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    plan: WidePlan | None = None,
) -> torch.Tensor:
    """x times NVFP4 weights; arguments as `halfbyte.kernels.linear.linear_few`.

    Args:
        plan: how to cut up the work; by default `wide_plan`.

    Returns:
        `[..., n]`: sums in float32, times the global scale, plus the bias, rounded once.
    """
    x = box_rows(x)
    dtype = x.dtype
    device = x.device.index
    launch = _launch(x.shape, n, dtype, device, plan)
    kernel, grid, threads, m, k, tokens, work, out_memory, workspace_memory, partial_bytes = launch
    out = allocate(out_memory, device)
    workspace = None if workspace_memory is None else allocate(workspace_memory, device)
    partial = 0 if workspace is None else workspace.data_ptr()
    params = _Params(
        weight.data_ptr(),
        weight_scale.data_ptr(),
        row_scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        partial,
        partial + partial_bytes,
        next(_RAISED) % 2**64,
        work,
    )
    columns = out_memory.shape[-1]
    x_map = tensor_map(x.data_ptr(), m, k, row_stride(x), dtype, tokens // 2)
    out_map = tensor_map(out.data_ptr(), m, columns, columns, dtype, _STRIP)
    nvrtc.launch(kernel, grid, threads, (x_map, out_map, params), overlap=True)
    return out if columns == n else out[..., :n].contiguous()


@lru_cache(maxsize=4096)
def _launch(
    shape: torch.Size, n: int, dtype: torch.dtype, device: int, plan: WidePlan | None
) -> _Launch:
    *outer, k = shape
    m = shape.numel() // k
    plan = plan or wide_plan(n, k, m, multiprocessors(device))
    steps = plan.steps(k)
    if _most_sharers(plan, steps) > _MOST_SHARERS:
        raise ValueError(f"{plan}: more than {_MOST_SHARERS} clusters have parts of a tile")
    # With a tile or more per cluster, only the ends of tiles are left.
    kinds = (plan.cut_tiles > 0) + (0 < plan.cut_tiles < plan.clusters)
    places = kinds * 2 * plan.clusters
    partial_bytes = 4 * places * plan.tokens * rows_of_pair(plan.tokens) // 2
    flags = 2 * _SHAPES[plan.tokens].groups * plan.clusters * _MOST_SHARERS
    return _Launch(
        _kernel(dtype, plan.tokens, device),
        grid=2 * plan.clusters,
        threads=128 * (_SHAPES[plan.tokens].groups + 1),
        m=m,
        k=k,
        tokens=plan.tokens,
        work=_Work(m, n, -(-n // TILE_N), steps, **work(plan, n, k, m)),
        # TMA writes rows of a multiple of 16 bytes.
        out=Memory.contiguous((*outer, -(-n // 8) * 8), dtype),
        workspace=Memory.contiguous(((partial_bytes + 8 * flags) // 8,), torch.int64)
        if plan.cut_tiles
        else None,
        partial_bytes=partial_bytes,
    )


def work(plan: WidePlan, n: int, k: int, m: int) -> dict[str, Any]:
    """What `linear_wide_work.cuh` needs of a plan, as fields of `_Work`.

    Raises:
        ValueError: numbers that the kernel could not divide.
    """
    row_pairs, line = _row_pairs(n, plan.tokens), plan.steps(k) + plan.crossing
    tiles, places = row_pairs * -(-m // plan.tokens), plan.cut_tiles * line
    if max(tiles * row_pairs, places * line, plan.clusters**3) >= _ONE:
        raise ValueError(f"n={n}, k={k}, m={m}: too large")
    if 0 < places < plan.clusters:
        raise ValueError(f"{plan}: {places} steps to share among {plan.clusters} clusters")
    return {
        "tiles": tiles,
        "cut_tiles": plan.cut_tiles,
        "crossing": plan.crossing,
        "row_pairs": _divisor(row_pairs),
        "line": _divisor(line),
        "clusters": _divisor(plan.clusters),
        "span": places // plan.clusters,
        "more": places % plan.clusters,
        "clusters_per_place": plan.clusters / max(places, 1),
    }


def _divisor(by: int) -> _KnownDivisor:
    return _KnownDivisor(by, -(-_ONE // by))


def compile_wide(dtype: torch.dtype, device: int) -> None:
    """Compile all that calls may need, so that none does in a graph's capture."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tokens: _kernel(dtype, tokens, device), _SHAPES))


@lru_cache(maxsize=32)
def _kernel(dtype: torch.dtype, tokens: int, device: int) -> nvrtc.Kernel:
    functions = (("linear_wide", shared_bytes(tokens)),)
    options = tuple(macros(dtype, tokens).items())
    return nvrtc.load("linear_wide", options, functions, device)["linear_wide"]


def shared_bytes(tokens: int) -> int:
    """Dynamic shared memory of a CTA: the ring's stages, the tile of the result, and a few words.

    Args:
        tokens: rows of x in a tile.
    """
    shape, rows = _SHAPES[tokens], rows_of_pair(tokens) // 2
    stage = (tokens * 2 + rows // 2 + rows // 16) * shape.step + 16
    return shape.stages * stage + tokens * rows * 2 + 16


def macros(dtype: torch.dtype, tokens: int) -> dict[str, int | None]:
    """Macros that `linear_wide.cu` is compiled with."""
    shape = _SHAPES[tokens]
    return {
        "X_BF16": int(dtype == torch.bfloat16),
        "TOKENS": tokens,
        "STEP": shape.step,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
    }


def _row_pairs(n: int, tokens: int) -> int:
    """Pairs of tiles of W's rows: a cluster has both."""
    return -(-n // rows_of_pair(tokens))
