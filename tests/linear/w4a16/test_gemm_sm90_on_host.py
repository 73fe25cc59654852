"""The W4A16 GEMM kernel: launcher and CUDA source, run on the CPU, against float64."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import memset, string_at
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

import cuda_on_host
from cuda_on_host import guarded, needs_compiler
from halfbyte.kernels.runtime import nvrtc
from halfbyte.linear.w4a16.gemm_sm90 import launcher as gemm
from halfbyte.linear.w4a16.gemm_sm90.plan import (
    GROUP_ROWS,
    MAX_SHARERS,
    TILES,
    GemmPlan,
    Tile,
    make_plan,
)
from halfbyte.linear.w4a16.packed_weight import pack_weight
from halfbyte.numerics import nvfp4
from linear.w4a16.gemm_tiles import DIFFERENT, tile_named
from slow import one_in

pytestmark = needs_compiler

NARROW = tile_named("128x64")


class Case(NamedTuple):
    """Arguments of `gemm.run`, and the product in float64."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    bias: torch.Tensor
    exact: torch.Tensor
    sizes: torch.Tensor
    """As `exact`, of absolute values."""


def make_case(n: int, k: int, m: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
    """A case with weights in two parts; memory after every tensor is unmapped."""
    torch.manual_seed(seed)
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0x20, 0x60, (n, k // 16), dtype=torch.uint8)
    common, sizes = torch.tensor([0.003, 0.7]), (n // 3, n - n // 3)
    packed = pack_weight(data, scales, common, sizes, dtype)
    row_scales = torch.repeat_interleave(common, torch.tensor(sizes))[:, None]
    weight = nvfp4.dequantize(data, scales.view(torch.float8_e4m3fn), row_scales, torch.float64)
    x, bias = torch.randn(m, k, dtype=dtype), torch.randn(n, dtype=dtype)
    exact = x.double() @ weight.t() + bias.double()
    absolute = x.double().abs() @ weight.abs().t() + bias.double().abs()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return guarded(tensor.shape, tensor.dtype).copy_(tensor)

    weights = (moved(packed.weight), moved(packed.weight_scale), moved(packed.row_scale))
    return Case(moved(x), weights, moved(bias), exact, absolute)


@contextmanager
def on_host(clusters_at_once: Sequence[int]) -> Iterator[None]:
    """Let the launcher's kernel run on the CPU.

    Args:
        clusters_at_once: that run at the same time, of a launch and, if there are several, of
            replays with the same arguments. Before each the sums that clusters leave become NaN,
            but flags stay as the one before has left them.
    """

    def kernel(dtype: torch.dtype, tile: Tile, device: object, swiglu: bool) -> tuple[Any, int]:
        macros = gemm.macros(dtype, tile, swiglu)
        library = cuda_on_host.build("linear/w4a16/gemm_sm90/gemm.cu", macros)
        return library.linear_gemm, gemm.shared_bytes(tile)

    def launch(
        kernel: tuple[Any, int], grid: int, threads: int, arguments: Any, *, overlap: bool
    ) -> None:
        function, shared = kernel
        sums = arguments[-1].partial
        for at_once in clusters_at_once:
            if sums:
                memset(sums, 0xFF, arguments[-1].flags - sums)
            cuda_on_host.launch(
                function,
                grid,
                threads,
                *arguments,
                shared_bytes=shared,
                clusters_at_once=min(at_once, grid // 2),
            )
            if sums:
                assert not flags_left(arguments[-1], grid, threads)

    def flags_left(params: Any, grid: int, threads: int) -> bool:
        """Flags that are still raised; a graph replay would mistake them for its own."""
        count = grid * (threads // 128 - 1) * MAX_SHARERS
        flags = np.frombuffer(string_at(params.flags, 8 * count), np.uint64)
        return bool(np.isin(flags - np.uint64(params.flag_epoch), [0, 1]).any())

    gemm.gemm_product.cache_clear()
    with (
        patch.object(nvrtc, "launch", launch),
        cuda_on_host.tensor_maps_on_host(),
        patch.object(gemm, "_kernel", kernel),
        patch.object(gemm, "allocate", cuda_on_host.allocate),
    ):
        yield
    gemm.gemm_product.cache_clear()


def launched(case: Case, plan: GemmPlan, swiglu: bool = False) -> torch.Tensor:
    launch = gemm.gemm_product(
        case.x.shape, len(case.bias), case.x.dtype, case.x.get_device(), plan, swiglu
    )
    return launch(case.x, *case.weights, case.bias)


def product(
    case: Case, plan: GemmPlan, *clusters_at_once: int, swiglu: bool = False
) -> torch.Tensor:
    """The product by the launcher, with or without SwiGLU; see `on_host`."""
    with on_host(clusters_at_once or [1]):
        return launched(case, plan, swiglu)


def assert_product(out: torch.Tensor, case: Case) -> None:
    """Tolerance: one rounding of the result, and float32 rounding of sums of exact operands."""
    eps = torch.finfo(out.dtype).eps / 2
    allowed = eps * case.exact.abs() * 1.01 + 2**-18 * case.sizes
    assert out.isfinite().all()
    worst = float(((out.double() - case.exact).abs() / allowed).max())
    assert worst <= 1, f"{worst:.2f} times the error that roundings may make"


@pytest.mark.parametrize(
    ("tile", "dtype"),
    one_in(
        5,
        [
            *((tile, torch.bfloat16) for tile in TILES),
            *((tile, torch.float16) for tile in DIFFERENT),
        ],
    ),
    ids=str,
)
def test_products(tile: Tile, dtype: torch.dtype) -> None:
    n, k, m = 200, 144, tile.tokens + 9
    case = make_case(n, k, m, dtype)
    assert_product(product(case, make_plan(n, k, m, 8, tile)), case)


@pytest.mark.parametrize("tile", one_in(3, DIFFERENT), ids=str)
def test_a_ring_that_goes_round(tile: Tile) -> None:
    """A stage is not overwritten while a matmul still reads it."""
    n, m, k = 70, tile.tokens + 20, 2 * tile.stages * tile.step
    case, plan = make_case(n, k, m), GemmPlan(tile, 2, 1, 0)
    for _ in range(3):
        assert_product(product(case, plan), case)


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("crossing", [0, 1])
@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_tiles_that_are_cut(clusters: int, crossing: int, at_once: int) -> None:
    n, k, m = 300, 512, 70
    case = make_case(n, k, m)
    tiles = NARROW.pairs(n, m)
    out = product(case, GemmPlan(NARROW, tiles, clusters, tiles, crossing), at_once)
    assert_product(out, case)


def test_the_order_of_clusters_changes_no_bit() -> None:
    n, k, m = 256, 768, 40
    case = make_case(n, k, m)
    plan = GemmPlan(NARROW, 1, 4, 1)
    outs = [product(case, plan, at_once) for at_once in (1, 2, 3, 4, 4, 4)]
    assert_product(outs[0], case)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("at_once", [(1, 4, 1, 4), (2, 4, 4), (3, 1, 2, 4), (4, 4, 4, 4)], ids=str)
def test_replays(at_once: tuple[int, ...]) -> None:
    """Per replay, a cluster may finish its tokens or leave them to the tile's head (`join.cuh`)."""
    n, k, m = 500, 384, 40
    case = make_case(n, k, m)
    for plan in (GemmPlan(NARROW, 2, 4, 2, 1), GemmPlan(NARROW, 2, 6, 2, 0)):
        assert_product(product(case, plan, *at_once), case)


def sums_nobody_left(case: Case, plan: GemmPlan, clusters_at_once: int) -> int:
    """Places for partial sums that were not written."""
    found: list[int] = []
    with on_host([clusters_at_once]):
        on_cpu = nvrtc.launch

        def launch(*arguments: Any, **options: Any) -> None:
            on_cpu(*arguments, **options)
            params = arguments[3][-1]
            left = np.frombuffer(string_at(params.partial, params.flags - params.partial), np.int32)
            found.append(int((left == -1).sum()))

        with patch.object(nvrtc, "launch", launch):
            launched(case, plan)
    return found[0]


def test_clusters_that_run_at_once_finish_a_tile_together() -> None:
    """A warpgroup whose tile's head runs keeps its share, the others leave all sums."""
    case, plan = make_case(256, 768, 60), GemmPlan(NARROW, 1, 2, 1)
    alone = sums_nobody_left(case, plan, 1)
    together = [sums_nobody_left(case, plan, 2) for _ in range(8)]
    share = NARROW.tokens // 2 * GROUP_ROWS
    assert all((found - alone) % share == 0 for found in together)
    assert max(together) > alone


def test_random_plans() -> None:
    rng = Random(0)
    for seed in range(8):
        n, k, m = rng.randint(1, 600), 16 * rng.randint(1, 40), rng.randint(1, 200)
        tiles = NARROW.pairs(n, m)
        steps = GemmPlan(NARROW, tiles, 1, 0).steps(k)
        clusters = rng.randint(1, min(6, tiles * steps))
        cut = clusters * (tiles > clusters) + tiles % clusters
        crossing = rng.choice((0, 1, 2)) if cut * steps >= clusters else 0
        plan = GemmPlan(NARROW, tiles, clusters, cut, crossing)
        case = make_case(n, k, m, seed=seed)
        at_once = [rng.randint(1, clusters) for _ in range(rng.randint(1, 3))]
        assert_product(product(case, plan, *at_once), case)
