"""The W4A16 kernel for many rows: plans and compilation anywhere, products on SM90."""

import pytest
import torch

from halfbyte.kernels import linear_wide as wide
from halfbyte.kernels.linear_weights import DTYPES, pack_weight
from halfbyte.kernels.linear_wide import STEP, WidePlan, wide_plan
from halfbyte.numerics import nvfp4
from linear.machines import H200

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
PROCESSORS = H200.groups[0]
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (200, 144), (48, 16), (128256, 4096)]


@DTYPE
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_kernel_compiles(tokens: int, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from halfbyte.kernels import nvrtc

    options = wide.macros(dtype, tokens)
    assert nvrtc.compile_source("linear_wide", options, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.parametrize("m", [1, 33, 64, 128, 129, 300, 1024, 4096])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plans_cover_all_tiles(n: int, k: int, m: int) -> None:
    plan = wide_plan(n, k, m, PROCESSORS)
    tiles = -(-n // 256) * -(-m // plan.tokens)
    assert 0 <= plan.tiles - tiles < plan.clusters
    # Whole turns of all clusters behind the tiles that are cut.
    assert (plan.tiles - plan.cut_tiles) % plan.clusters == 0
    assert plan.cut_tiles <= tiles
    steps = plan.cut_tiles * -(-k // STEP)
    assert plan.cut_tiles == 0 or steps >= plan.clusters


def test_many_rows_take_large_tiles() -> None:
    assert [wide_plan(28672, 4096, m, PROCESSORS).tokens for m in (33, 128, 256)] == [64, 128, 256]


def product(
    n: int, k: int, m: int, dtype: torch.dtype, plan: WidePlan | None, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, the exact one, that of the dequantized weight in `dtype`), of two parts."""
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
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    out = wide.linear_wide(x, *tensors, bias, n, plan)
    exact = x.double() @ weight.t() + bias.double()
    return out, exact, torch.nn.functional.linear(x, weight.to(dtype), bias)


def assert_close(out: torch.Tensor, exact: torch.Tensor, baseline: torch.Tensor) -> None:
    allowed = 2 * (baseline.double() - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed


def needs_sm90() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is SM90's")


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize("m", [1, 40, 129, 300, 1100])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 144), (1001, 512), (3072, 1024), (8, 64)])
def test_products(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    needs_sm90()
    for tokens in (None, 64, 128, 256):
        assert_close(*product(n, k, m, dtype, wide_plan(n, k, m, PROCESSORS, tokens)))


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize("clusters", [1, 2, 5, 7])
def test_tiles_that_are_cut_anywhere(clusters: int, dtype: torch.dtype) -> None:
    needs_sm90()
    n, k, m = 700, 1024, 200
    for tokens in (64, 256):
        tiles = -(-n // 256) * -(-m // tokens)
        plan = WidePlan(tokens, tiles, clusters, tiles)
        out, exact, baseline = product(n, k, m, dtype, plan)
        assert_close(out, exact, baseline)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 4, 8], ids=["odd", "8-bytes", "16-bytes"])
def test_rows_of_x_may_lie_apart(offset: int) -> None:
    needs_sm90()
    assert_close(*product(256, 256, 70, torch.bfloat16, None, offset))


@pytest.mark.gpu
def test_replays_and_streams_give_the_same_bits() -> None:
    needs_sm90()
    n, k, m = 1536, 2048, 100
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x20, 0x60, (n, k // 16), dtype=torch.uint8, device="cuda")
    packed = pack_weight(data, scales, torch.ones(1, device="cuda"), (n,), torch.bfloat16)
    tensors = (packed.weight, packed.weight_scale, packed.row_scale)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    assert wide_plan(n, k, m, PROCESSORS).cut_tiles > 0
    wanted = wide.linear_wide(x, *tensors, None, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = wide.linear_wide(x, *tensors, None, n)
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, wanted)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(wide.linear_wide(x, *tensors, None, n))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)
