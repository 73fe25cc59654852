"""The W4A16 GEMM kernel on an SM90: cut tiles, graph replays, concurrent kernels."""

from typing import NamedTuple

import pytest
import torch

from halfbyte.linear.w4a16.gemm_sm90 import launcher as gemm
from halfbyte.linear.w4a16.gemm_sm90.plan import TILES, GemmPlan, Tile, make_plan
from halfbyte.linear.w4a16.packed_weight import pack_weight
from halfbyte.linear.w4a16.packed_words import DTYPES
from halfbyte.numerics import nvfp4
from linear.gpus import H200
from linear.w4a16.gemm_tiles import DIFFERENT

pytestmark = pytest.mark.gpu

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NUM_SMS = H200.num_sms


class Case(NamedTuple):
    """Arguments of `gemm.run`, and results to compare with."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    bias: torch.Tensor
    exact: torch.Tensor
    """In float64."""
    baseline: torch.Tensor
    """Of the dequantized weight in x's dtype."""

    def product(self, plan: GemmPlan | None = None) -> torch.Tensor:
        x, n = self.x, len(self.bias)
        return gemm.gemm_product(x.shape, n, x.dtype, x.get_device(), plan)(
            x, *self.weights, self.bias
        )


def make_case(n: int, k: int, m: int, dtype: torch.dtype, offset: int = 0) -> Case:
    """A case with weights in two parts; rows of x have a stride of K + `offset`."""
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x20, 0x60, (n, k // 16), dtype=torch.uint8, device="cuda")
    common = torch.tensor([0.003, 0.7], device="cuda")
    sizes = (n // 3, n - n // 3)
    packed = pack_weight(data, scales, common, sizes, dtype)
    weight = nvfp4.dequantize(
        data,
        scales.view(torch.float8_e4m3fn),
        torch.repeat_interleave(common, torch.tensor(sizes, device="cuda"))[:, None],
        torch.float64,
    )
    x = torch.randn(m, k + offset, device="cuda", dtype=dtype)[:, offset:]
    bias = torch.randn(n, device="cuda", dtype=dtype)
    exact = x.double() @ weight.t() + bias.double()
    baseline = torch.nn.functional.linear(x, weight.to(dtype), bias)
    torch.cuda.synchronize()  # weights are read before the kernel in front has ended
    weights = (packed.weight, packed.weight_scale, packed.row_scale)
    return Case(x, weights, bias, exact, baseline)


def assert_close(out: torch.Tensor, case: Case) -> None:
    exact = case.exact
    allowed = 2 * (case.baseline.double() - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed


def needs_sm90() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is SM90's")


@DTYPE
@pytest.mark.parametrize("m", [1, 40, 129, 300, 1100])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 144), (1001, 512), (3072, 1024), (8, 64)])
def test_products(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    needs_sm90()
    case = make_case(n, k, m, dtype)
    for tile in (None, *TILES):
        assert_close(case.product(make_plan(n, k, m, NUM_SMS, tile)), case)


@DTYPE
@pytest.mark.parametrize("clusters", [1, 2, 5, 7])
def test_tiles_that_are_cut_anywhere(clusters: int, dtype: torch.dtype) -> None:
    needs_sm90()
    n, k, m = 700, 1024, 200
    case = make_case(n, k, m, dtype)
    for tile in TILES:
        tiles = tile.pairs(n, m)
        assert_close(case.product(GemmPlan(tile, tiles, clusters, tiles)), case)


@DTYPE
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_whole_tiles_after_those_that_are_cut(tile: Tile, dtype: torch.dtype) -> None:
    needs_sm90()
    n, k, m, clusters = 700, 512, 500, 3
    case = make_case(n, k, m, dtype)
    tiles = tile.pairs(n, m)
    plan = GemmPlan(tile, tiles, clusters, clusters + tiles % clusters, 2)
    assert plan.cut_tiles < tiles
    assert_close(case.product(plan), case)


@DTYPE
@pytest.mark.parametrize("crossing", [0, 2])
@pytest.mark.parametrize("sharers", [1, 2, 3, 5, 8])
def test_tiles_that_clusters_share(sharers: int, crossing: int, dtype: torch.dtype) -> None:
    needs_sm90()
    n, k, tiles = 500, 4096, 4
    for tile in DIFFERENT:
        # The last tile has fewer strips than finishers, or all.
        for beyond in (3, 20, tile.tokens - 7):
            case = make_case(n, k, tile.tokens + beyond, dtype)
            for clusters in (tiles * sharers, tiles * sharers - 1):
                plan = GemmPlan(tile, tiles, clusters, tiles, crossing)
                assert sharers <= max(plan.sharers(plan.steps(k))) <= sharers + 1
                assert_close(case.product(plan), case)


@pytest.mark.parametrize("offset", [1, 4, 8], ids=["odd", "8-bytes", "16-bytes"])
def test_rows_of_x_may_lie_apart(offset: int) -> None:
    needs_sm90()
    case = make_case(256, 256, 70, torch.bfloat16, offset)
    assert_close(case.product(), case)


def captured(
    case: Case, plan: GemmPlan, launches: int
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of launches, each of which may start before the previous one has ended."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [case.product(plan) for _ in range(launches)]
    return graph, outs


@pytest.mark.parametrize("crossing", [0, 2])
@pytest.mark.parametrize("tile", DIFFERENT, ids=str)
def test_graphs_that_run_at_once(tile: Tile, crossing: int) -> None:
    needs_sm90()
    n, k, m = 1536, 4096, 250
    case = make_case(n, k, m, torch.bfloat16)
    tiles = tile.pairs(n, m)
    plan = GemmPlan(tile, tiles, 66, tiles, crossing)
    wanted = case.product(plan)
    assert_close(wanted, case)
    graphs = [captured(case, plan, 4) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for out in (out for _, outs in graphs for out in outs):
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(5):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for _, outs in graphs for out in outs)


def test_replays_and_streams_give_the_same_bits() -> None:
    needs_sm90()
    n, k, m = 1536, 2048, 100
    case = make_case(n, k, m, torch.bfloat16)
    assert make_plan(n, k, m, NUM_SMS).cut_tiles > 0
    wanted = case.product()
    assert_close(wanted, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.product()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(case.product())
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)
