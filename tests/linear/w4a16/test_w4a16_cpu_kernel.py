"""C++ products with NVFP4 weights, on every instruction set that this CPU has."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.kernels.cpu.library import library
from halfbyte.linear.w4a16 import cpu as launcher
from halfbyte.linear.w4a16.cpu import (
    CpuPackedWeight,
    dequantize_cpu,
    linear_cpu,
    pack_weight,
    unpack_weight,
)
from halfbyte.numerics import nvfp4

pytestmark = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 16), (16, 64), (17, 48), (33, 80), (100, 4096), (130, 336)]
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 100]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_weight(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and scales of all magnitudes without NaN, most of them ordinary."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    ordinary = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, generator=generator)
    every = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    scales = torch.where(torch.rand(n, k // 16, generator=generator) < 0.9, ordinary, every)
    return weight, scales.view(torch.float8_e4m3fn)


def row_scales(n: int) -> torch.Tensor:
    """Three parts with very different global scales."""
    sizes = torch.tensor([n // 3, n // 2 - n // 3, n - n // 2])
    return torch.tensor([3e-3, 7.7e-6, 0.4]).repeat_interleave(sizes)


def packed(n: int, k: int, seed: int = 0) -> CpuPackedWeight:
    return CpuPackedWeight(*pack_weight(*random_weight(n, k, seed)), row_scales(n))


def random_input(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k))
    return torch.where(x.abs() < 1e-3, 1e-3, x).to(dtype)


def assert_close_enough(
    out: torch.Tensor,
    x: torch.Tensor,
    weight64: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
) -> None:
    """Tier 2, in each part: twice the error of PyTorch's product in x's dtype."""
    assert out.shape == (x.shape[0], weight64.shape[0])
    assert out.dtype == x.dtype
    exact = F.linear(x.double(), weight64, None if bias is None else bias.double())
    usual = F.linear(x, weight64.to(x.dtype), None if bias is None else bias.to(x.dtype)).double()
    for scale in scales.unique() if x.shape[0] else ():
        part = scales == scale
        error = (out.double() - exact)[:, part].abs().max()
        allowed = 2 * (usual - exact)[:, part].abs().max() + 1e-5 * exact[:, part].abs().max()
        assert error <= allowed, f"global scale {scale:.3g}: {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_error_is_that_of_a_product_in_the_same_dtype(
    level: str, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, scales = random_weight(n, k)
    parts = row_scales(n)
    weight64 = nvfp4.dequantize(weight, scales, parts[:, None], torch.float64)
    packed_weight = CpuPackedWeight(*pack_weight(weight, scales), parts)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)) * parts
    for m in ROWS:
        x = random_input(m, k, dtype)
        assert_close_enough(linear_cpu(x, packed_weight), x, weight64, None, parts)
        for b in (bias, bias.to(dtype)):
            assert_close_enough(linear_cpu(x, packed_weight, b), x, weight64, b, parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_where_float32_is(level: str, dtype: torch.dtype) -> None:
    """Powers of two: every product and sum is exact, so every code and scale must be read right."""
    scales = torch.arange(0x7F, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    codes = torch.arange(16).repeat(127, 1)
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    x = torch.eye(16, dtype=dtype)
    out = linear_cpu(x, CpuPackedWeight(*pack_weight(weight, scales), torch.full((127,), 0.25)))
    wanted = nvfp4.dequantize(weight, scales, 0.25, dtype).t()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding_with_the_bias(level: str, dtype: torch.dtype) -> None:
    """1 + 2^-k - 1 survives only if nothing is rounded before the bias is added."""
    k = {torch.float32: 20, torch.float16: 13, torch.bfloat16: 10}[dtype]
    weight = torch.full((16, 8), 0x02, dtype=torch.uint8)  # 1, 0, 1, 0 ...
    scales = torch.ones(16, 1).to(torch.float8_e4m3fn)
    x = torch.zeros(3, 16, dtype=dtype)
    x[:, 0], x[:, 2] = 1, 2.0**-k
    bias = -torch.ones(16, dtype=dtype)
    out = linear_cpu(x, CpuPackedWeight(*pack_weight(weight, scales), torch.ones(16)), bias)
    assert torch.equal(out, torch.full((3, 16), 2.0**-k, dtype=dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 65504.0, 1e-5, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_kind(level: str, dtype: torch.dtype, value: float) -> None:
    """Results from NaN to overflow are rounded as PyTorch rounds them."""
    out_of_range = value not in (1e-30,)
    parts = torch.tensor([1.0, 3.0, 2.0**-12, 100.0, 7e-5]).repeat(5)
    weight = torch.full((25, 8), 0x02, dtype=torch.uint8)
    scales = torch.ones(25, 1).to(torch.float8_e4m3fn)
    x = torch.zeros(9, 16)
    x[::2, 0] = value
    packed_weight = CpuPackedWeight(*pack_weight(weight, scales), parts)
    out = linear_cpu(x.to(dtype), packed_weight)
    wanted = (x.to(dtype).float()[:, :1] * parts).to(dtype)
    if out_of_range or dtype != torch.float16:
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    else:
        assert not out.any()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_scale_stays_in_its_row(level: str, dtype: torch.dtype, byte: int) -> None:
    weight, scales = random_weight(50, 336)
    clean = CpuPackedWeight(*pack_weight(weight, scales), row_scales(50))
    scales.view(torch.uint8)[37, 20] = byte
    broken = CpuPackedWeight(*pack_weight(weight, scales), row_scales(50))
    for m in (1, 3, 40):
        x = random_input(m, 336, dtype)
        out, wanted = linear_cpu(x, broken), linear_cpu(x, clean)
        assert out[:, 37].isnan().all()
        assert torch.equal(out[:, :37], wanted[:, :37])
        assert torch.equal(out[:, 38:], wanted[:, 38:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(40, 80), (17, 1040)])
def test_batch_invariance(level: str, threads: None, n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = packed(n, k), torch.randn(n)
    x = random_input(4096, k, dtype)
    whole = linear_cpu(x, weight, bias)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 513, 769, 4095):
        for start in {0, 5, 4096 - m}:
            some = slice(start, start + m)
            assert torch.equal(linear_cpu(x[some], weight, bias), whole[some]), (m, start)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert torch.equal(linear_cpu(x, weight, bias), whole)
        assert torch.equal(linear_cpu(x[:3], weight, bias), whole[:3])
    torch.set_num_threads(1)
    assert torch.equal(linear_cpu(x[:700], weight, bias), whole[:700])
    others = x.flip(0).clone()
    others[1::2] = torch.nan
    assert torch.equal(linear_cpu(others, weight, bias)[::2], whole.flip(0)[::2])


def test_work_for_several_threads(level: str, threads: None) -> None:
    """Large enough that every loop runs on several threads."""
    weight = packed(700, 512)
    for m in (1, 5, 200):
        x = random_input(m, 512)
        torch.set_num_threads(1)
        alone = linear_cpu(x, weight)
        torch.set_num_threads(5)
        assert torch.equal(linear_cpu(x, weight), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_x_and_bias(level: str, dtype: torch.dtype) -> None:
    weight, bias = packed(33, 80), torch.randn(33).to(dtype)
    x = random_input(12, 80, dtype)
    wanted = linear_cpu(x, weight, bias)
    wide = torch.full((12, 200), torch.nan, dtype=dtype)
    wide[:, 7:87] = x
    assert torch.equal(linear_cpu(wide[:, 7:87], weight, bias), wanted)
    assert torch.equal(linear_cpu(wide[1::2, 7:87], weight, bias), wanted[1::2])
    assert torch.equal(linear_cpu(x.t().contiguous().t(), weight, bias), wanted)
    assert torch.equal(linear_cpu(x[:1].expand(5, -1), weight, bias), wanted[:1].expand(5, -1))
    assert torch.equal(linear_cpu(x, weight, bias.repeat_interleave(2)[::2]), wanted)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_pack_and_back(n: int, k: int) -> None:
    weight, scales = random_weight(n, k)
    codes, turned = pack_weight(weight, scales)
    assert codes.shape == (-(-n // 16), -(-k // 64), 512)
    assert turned.shape == (-(-n // 16), -(-k // 64), 64)
    # The exact position: the word of columns 8 w .. 8 w + 7 of a chunk, and its row.
    row, column = n - 1, k - 2
    byte = column % 64 // 8 * 64 + row % 16 * 4 + column % 8 // 2
    assert codes[row // 16, column // 64, byte] == weight[row, column // 2]
    place = column % 64 // 16 * 16 + row % 16
    scale_bytes = turned.view(torch.uint8)
    assert scale_bytes[row // 16, column // 64, place] == scales.view(torch.uint8)[row, -1]
    again, scales_again = unpack_weight(codes, turned, n, k)
    assert torch.equal(again, weight)
    assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (530, 1104)])
def test_dequantize_is_the_oracles(level: str, n: int, k: int, dtype: torch.dtype) -> None:
    weight, scales = random_weight(n, k)
    parts = row_scales(n)
    turned = dequantize_cpu(CpuPackedWeight(*pack_weight(weight, scales), parts), k, dtype)
    assert torch.equal(turned.t(), nvfp4.dequantize(weight, scales, parts[:, None], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_product_of_unpacked_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of large M on machines where PyTorch's dense product is much faster."""
    monkeypatch.setattr(launcher, "_is_dense_faster", lambda dtype: True)
    monkeypatch.setattr(launcher, "_DENSE_VALUES", 336 * 48)  # three panels, one short
    weight, scales = random_weight(130, 336)
    parts = row_scales(130)
    packed_weight = CpuPackedWeight(*pack_weight(weight, scales), parts)
    weight64 = nvfp4.dequantize(weight, scales, parts[:, None], torch.float64)
    x, bias = random_input(100, 336, dtype), torch.randn(130) * parts
    for b in (None, bias, bias.to(dtype)):
        out = linear_cpu(x, packed_weight, b, batch_invariant=False)
        assert_close_enough(out, x, weight64, b, parts)
        invariant = linear_cpu(x, packed_weight, b)
        assert torch.equal(invariant[:3], linear_cpu(x[:3], packed_weight, b))
        # Small M never takes that path.
        assert torch.equal(
            linear_cpu(x[:9], packed_weight, b, batch_invariant=False), invariant[:9]
        )


def test_wide_vectors_decide_on_the_dense_product(level: str) -> None:
    assert launcher._is_dense_faster(torch.float32) == (level == "portable")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    n=st.integers(1, 70),
    blocks=st.integers(1, 13),
    m=st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_shape(level: str, n: int, blocks: int, m: int, dtype: torch.dtype, seed: int) -> None:
    k = 16 * blocks
    weight, scales = random_weight(n, k, seed)
    parts = row_scales(n)
    weight64 = nvfp4.dequantize(weight, scales, parts[:, None], torch.float64)
    x = random_input(m, k, dtype)
    out = linear_cpu(x, CpuPackedWeight(*pack_weight(weight, scales), parts))
    # Against the largest product of a row with the magnitudes: sums may cancel.
    bound = F.linear(x.double().abs(), weight64.abs())
    tolerance = bound * torch.finfo(torch.float32).eps * k + out.double().abs() * (
        0 if dtype == torch.float32 else torch.finfo(dtype).eps
    )
    smallest = torch.finfo(dtype).smallest_normal
    assert ((out.double() - F.linear(x.double(), weight64)).abs() <= tolerance + smallest).all()


def test_refuses_what_does_not_fit() -> None:
    codes, scales = pack_weight(*random_weight(20, 64))
    rows, x = row_scales(20), torch.ones(1, 64)
    with pytest.raises(ValueError, match=r"bias: expected \[20\], got \[1\]"):
        linear_cpu(x, CpuPackedWeight(codes, scales, rows), torch.ones(1))
    with pytest.raises(ValueError, match=r"expected contiguous codes uint8 \[2, 2, 512\].* K = 80"):
        linear_cpu(torch.ones(1, 80), CpuPackedWeight(codes, scales, rows))
    with pytest.raises(ValueError, match=r"K = 56, a multiple of 16"):
        linear_cpu(x[:, :56], CpuPackedWeight(codes, scales, rows))
    for wrong in (
        CpuPackedWeight(codes, scales, rows.half()),
        CpuPackedWeight(codes, scales, row_scales(33)),
        CpuPackedWeight(codes, scales, rows.repeat_interleave(2)[::2]),
        CpuPackedWeight(codes, scales.float(), rows),
        CpuPackedWeight(codes, scales[:1], rows),
        CpuPackedWeight(codes.transpose(0, 2).contiguous().transpose(0, 2), scales, rows),
        CpuPackedWeight(codes.view(torch.int8), scales, rows),
    ):
        with pytest.raises(ValueError, match="weight: expected contiguous codes"):
            linear_cpu(x, wrong)
        with pytest.raises(ValueError, match="weight: expected contiguous codes"):
            dequantize_cpu(wrong, 64, torch.float32)
