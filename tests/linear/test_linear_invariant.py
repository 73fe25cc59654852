"""Batch-invariant products and functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.linear.invariant import products
from halfbyte.linear.invariant.cpu import product_cpu
from halfbyte.linear.invariant.products import InvariantProducts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (3, 5, 7), (65, 131, 300), (17, 64, 256), (33, 200, 513)]


def strided(weight: torch.Tensor) -> list[torch.Tensor]:
    """The same values with other strides."""
    wide = torch.stack([weight, weight], -1).flatten(1)[:, ::2]
    return [weight, weight.t().contiguous().t(), wide]


def assert_product(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(m)
    x, w = (torch.randn(*s, generator=generator).to(dtype) for s in ((m, k), (n, k)))
    expected = x.double() @ w.double().t()
    bound = 1e-6 * (x.double().abs() @ w.double().abs().t()) + 1e-30
    whole = function(x, w)
    assert whole.dtype == torch.float32
    for weight in strided(w):
        result = function(x, weight)
        assert torch.equal(result, whole)
        assert ((result - expected).abs() <= bound * max(1, k**0.5 / 8)).all()
    for rows in ([0], [m - 1], list(range(m))[::-1], [m // 2] * 5):
        assert torch.equal(function(x[rows], w), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_cpu(dtype: torch.dtype, shape: tuple[int, int, int], level: str) -> None:
    assert_product(product_cpu, dtype, *shape)


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 5, 0)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_product_of_nothing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    result = product_cpu(torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype))
    assert torch.equal(result, result.new_zeros(m, n))


def test_product_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.linear.invariant.cpu.library", lambda: None)
    assert_product(product_cpu, torch.bfloat16, 33, 20, 70)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, w = torch.randn(9, 70).to(dtype), torch.randn(130, 70).to(dtype)
    clean = product_cpu(x, w)
    for row in range(9):
        spoiled = x.clone()
        spoiled[row] = torch.nan
        spoiled[row, 3] = torch.inf
        result = product_cpu(spoiled, w)
        assert result[row].isnan().all()
        keep = [i for i in range(9) if i != row]
        assert torch.equal(result[keep], clean[keep])


def test_product_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    from triton_interpreter import interpreted

    function = interpreted("halfbyte.linear.invariant.triton").product_triton
    for dtype in (torch.float32, torch.float16):  # its bfloat16 products are wrong
        for m, n, k in ((1, 5, 7), (70, 65, 100)):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            for weight in strided(w):
                torch.testing.assert_close(
                    function(x, weight), x.float() @ w.float().t(), rtol=1e-4, atol=1e-3
                )


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_product_triton_compiles_without_spilling(capability: int, dtype: str) -> None:
    pytest.importorskip("triton")
    from halfbyte.linear.invariant.triton import product_kernel
    from triton_compiler import SHARED_BYTES, compile_kernel

    types = {"x": f"*{dtype}", "weight": f"*{dtype}", "out": "*fp32"}
    depth = 32 if dtype == "fp32" else 64
    constants = {"tile_m": 64, "tile_n": 64, "tile_k": depth, "precision": "ieee", "k_stride": 1}
    usage = compile_kernel(product_kernel, types, constants, capability, num_warps=4, num_stages=3)
    assert usage.shared <= SHARED_BYTES[capability]
    assert usage.stack <= 16


CALLS: dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]] = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w["nk"], w["n"]),
    "linear without bias": lambda x, w: torch.nn.functional.linear(x[None], w["nk"])[0],
    "matmul": lambda x, w: x @ w["nk"].t(),
    "addmm": lambda x, w: torch.addmm(w["n"], x, w["nk"].t(), beta=0.5, alpha=2),
    "einsum": lambda x, w: torch.einsum("mk,nk->mn", x, w["nk"]),
    "mv": lambda x, w: torch.mv(x, w["nk"][0])[:, None],
    "bmm": lambda x, w: torch.bmm(x.expand(2, -1, -1), w["ekn"]).transpose(0, 1),
    "baddbmm": lambda x, w: torch.baddbmm(
        w["n"].expand(2, 1, -1), x.expand(2, -1, -1), w["ekn"]
    ).transpose(0, 1),
    "silu": lambda x, w: torch.nn.functional.silu(x),
    "sigmoid": lambda x, w: torch.sigmoid(x),
    "gelu": lambda x, w: torch.nn.functional.gelu(x),
    "softplus": lambda x, w: torch.nn.functional.softplus(x),
    "gelu tanh": lambda x, w: torch.nn.functional.gelu(x, approximate="tanh"),
    "rsqrt": lambda x, w: torch.rsqrt(x.abs()[:, :1]),
    "silu_": lambda x, w: torch.nn.functional.silu(x.clone(), inplace=True),
    "strided": lambda x, w: torch.sigmoid(x[:, ::2] * 1.702),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_models_call(name: str, dtype: torch.dtype, threads: int) -> None:
    """Rows do not depend on each other, and results equal PyTorch's up to rounding."""
    k, n = 301, 67  # not multiples of any vector
    shapes = {"x": (61, k), "nk": (n, k), "n": (n,), "ekn": (2, k, n)}
    generator = torch.Generator().manual_seed(0)
    w = {s: torch.randn(*shape, generator=generator).to(dtype) for s, shape in shapes.items()}
    x, call = w.pop("x"), CALLS[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), InvariantProducts():
            whole = call(x, w)
            for rows in (slice(0, 1), slice(5, 6), slice(0, 7), slice(17, 61)):
                assert torch.equal(call(x[rows], w), whole[rows])
        expected = call(x.double(), {s: v.double() for s, v in w.items()})
        assert whole.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=30 * tolerance)
    finally:
        torch.set_num_threads(before)


def test_grouped_products_of_experts() -> None:
    x, w = torch.randn(20, 32), torch.randn(3, 32, 16)
    offsets = torch.tensor([5, 5, 20], dtype=torch.int32)
    with torch.inference_mode(), InvariantProducts():
        result = torch._grouped_mm(x, w, offs=offsets)
        first = torch._grouped_mm(x[:1], w, offs=torch.tensor([1, 1, 1], dtype=torch.int32))
    expected = torch.cat([x[:5] @ w[0], x[5:] @ w[2]])
    torch.testing.assert_close(result, expected)
    assert torch.equal(first[0], result[0])


def test_functions_at_their_ends() -> None:
    """Large arguments, for which naive formulas overflow, give the limits."""
    x = torch.tensor([-200.0, -1e-30, 0.0, 1e-30, 200.0, torch.nan])
    ends = torch.tensor([-torch.inf, torch.inf])
    # At -inf, `silu` and `gelu` are -inf * 0. PyTorch's own `gelu` of inf is NaN on some CPUs.
    limits = {
        "silu": (torch.nan, torch.inf),
        "sigmoid": (0.0, 1.0),
        "gelu": (torch.nan, torch.inf),
        "softplus": (0.0, torch.inf),
    }
    for name, expected in limits.items():
        function: Any = getattr(torch.nn.functional, name)
        with InvariantProducts():
            result, at_ends = function(x), function(ends)
        torch.testing.assert_close(result, function(x), equal_nan=True)
        assert torch.equal(at_ends.nan_to_num(-1.0), torch.tensor(expected).nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means_by_a_product_with_ones(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double().mean(-1, keepdim=True)
    found = products._mean(x, [-1], True)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-7, torch.float16: 1e-4, torch.bfloat16: 1e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=4 * tolerance)
    assert torch.equal(products._mean(x, 2), found[..., 0])
    assert products._mean(x, -1, dtype=torch.float32).dtype == torch.float32
    for row in range(3):
        assert torch.equal(products._mean(x[row : row + 1], -1, True), found[row : row + 1])
    with pytest.raises(NotImplementedError, match="a mean of"):
        products._mean(x, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [300, 4096])
def test_norms_of_a_row_beside_others_on_a_gpu(size: int) -> None:
    """PyTorch's own mean of one row of 4,096 has other bits than that of 64 rows."""
    x = torch.randn(64, size, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with InvariantProducts():
        whole = x.pow(2).mean(-1, keepdim=True)
        for rows in (1, 2, 7, 16):
            assert torch.equal(x[:rows].pow(2).mean(-1, keepdim=True), whole[:rows])
