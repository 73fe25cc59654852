"""SwiGLU inside the W4A16 GEMM kernel, run on the CPU, against float64."""

import pytest
import torch

from cuda_on_host import needs_compiler
from halfbyte.linear.w4a16.gemm_sm90.plan import SWIGLU_TILES, GemmPlan, Tile, make_plan
from linear.w4a16.gemm_tiles import tile_named
from linear.w4a16.test_gemm_sm90_on_host import Case, make_case, product
from slow import one_in

pytestmark = needs_compiler

NARROW = tile_named("128x64")


def make_gated_case(n: int, k: int, m: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Products of about 1, where the activation is neither 0 nor linear."""
    case = make_case(n, k, m, dtype)
    factor = 1 / float(case.exact.abs().mean())
    product = (case.exact - case.bias.double()) * factor
    case.weights[2].mul_(factor)
    case.bias.mul_(factor)
    return case._replace(exact=product + case.bias.double(), sizes=case.sizes * factor)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def assert_swiglu_of(out: torch.Tensor, product: torch.Tensor) -> None:
    """One rounding of the result, and the error of `ex2.approx`."""
    exact = swiglu(product)
    eps = torch.finfo(out.dtype).eps / 2
    assert_near(out, exact, exact.abs() * (eps * 1.01 + 2**-18))


def assert_swiglu(out: torch.Tensor, case: Case) -> None:
    """Roundings of gate, up and the result, and float32 rounding of sums."""
    eps = torch.finfo(out.dtype).eps / 2
    gate, up = case.exact.chunk(2, dim=-1)
    gate_error, up_error = (eps * 1.01 * case.exact.abs() + 2**-18 * case.sizes).chunk(2, dim=-1)
    # silu's slope is at most 1.1.
    error = 1.1 * gate_error * (up.abs() + up_error) + gate.abs() * up_error
    exact = swiglu(case.exact)
    assert_near(out, exact, error + eps * 1.01 * (exact.abs() + error))


def assert_near(out: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> None:
    assert out.shape == exact.shape
    assert out.isfinite().all()
    tiny = float(torch.finfo(out.dtype).smallest_normal) * 2**-7
    worst = float(((out.double() - exact).abs() / (allowed + tiny)).max())
    assert worst <= 1, f"{worst:.2f} times the error that roundings may make"


@pytest.mark.parametrize("tile", one_in(4, SWIGLU_TILES), ids=str)
def test_swiglu_of_a_product(tile: Tile) -> None:
    """Of the product's rounded values, where both kernels sum in one order."""
    n, k, m = 384, 144, tile.tokens + 9
    for dtype in (torch.bfloat16, torch.float16):
        case, plan = make_gated_case(n, k, m, dtype), GemmPlan(tile, tile.pairs(n, m), 2, 0)
        out = product(case, plan, swiglu=True)
        assert_swiglu_of(out, product(case, plan))
        assert_swiglu(out, case)


@pytest.mark.parametrize("at_once", [(1,), (2,), (4,), (1, 4, 2, 3)], ids=str)
@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_swiglu_of_tiles_that_are_cut(clusters: int, at_once: tuple[int, ...]) -> None:
    """Both warpgroups of a CTA finish the same tokens, or leave them to the tile's head."""
    n, k, m = 512, 768, 70
    case, tiles = make_gated_case(n, k, m), NARROW.pairs(n, m)
    for crossing in (0, 1):
        plan = GemmPlan(NARROW, tiles, clusters, tiles, crossing)
        assert_swiglu(product(case, plan, *at_once, swiglu=True), case)


def test_swiglu_changes_no_bit_with_the_order_of_clusters() -> None:
    case, plan = make_gated_case(256, 768, 40), GemmPlan(NARROW, 1, 4, 1)
    outs = [product(case, plan, at_once, swiglu=True) for at_once in (1, 2, 3, 4, 4, 4)]
    assert_swiglu(outs[0], case)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("at_once", [1, 2])
def test_swiglu_of_an_odd_number_of_blocks(at_once: int) -> None:
    """A cluster's second CTA has no rows of its own then."""
    case, plan = make_gated_case(128, 512, 33), GemmPlan(NARROW, 1, 2, 1)
    assert_swiglu(product(case, plan, at_once, swiglu=True), case)


def test_swiglu_in_chosen_plans() -> None:
    for n, k, m in ((640, 256, 150), (256, 1024, 64)):
        case = make_gated_case(n, k, m)
        assert_swiglu(product(case, make_plan(n, k, m, 8, swiglu=True), 4, swiglu=True), case)


def test_swiglu_needs_whole_blocks() -> None:
    case = make_case(192, 128, 16)
    with pytest.raises(ValueError, match="n % 128"):
        product(case, GemmPlan(NARROW, 1, 1, 0), swiglu=True)
