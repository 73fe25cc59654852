"""`halfbyte.numerics.nvfp4` encodes, bit for bit: both recipes, edge cases and errors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import nvfp4
from numerics import brute_force

NAN_SCALE = 0x7F
each_recipe = pytest.mark.parametrize("recipe", nvfp4.RECIPES)


def check(x: torch.Tensor, g: float | torch.Tensor, recipe: nvfp4.Recipe) -> None:
    data, scales = nvfp4.quantize(x, g, recipe)
    expected_data, expected_scales = brute_force.nvfp4_quantize(x, g, recipe)
    assert (data.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    torch.testing.assert_close(scales.view(torch.uint8), expected_scales, rtol=0, atol=0)
    torch.testing.assert_close(data, expected_data, rtol=0, atol=0)


def codes_and_scale(block: list[float], g: float = 1.0) -> tuple[list[int], int]:
    data, scales = nvfp4.quantize(torch.tensor(block + [0.0] * (16 - len(block))), g)
    return [n for byte in data.tolist() for n in (byte % 16, byte // 16)], int(
        scales.view(torch.uint8)
    )


def normal(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape)


def heavy_tailed(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) / torch.randn(shape).abs().clamp(min=1e-4)


def on_ties(shape: tuple[int, ...]) -> torch.Tensor:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 4.0, 0.0])
    sign = torch.randint(0, 2, shape) * 2 - 1
    return ties[torch.randint(0, len(ties), shape)] * sign


def with_specials(shape: tuple[int, ...]) -> torch.Tensor:
    specials = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -1e-9])
    x = torch.randn(shape)
    mask = torch.rand(shape) < 0.04
    return torch.where(mask, specials[torch.randint(0, len(specials), shape)], x)


def wide_range(shape: tuple[int, ...]) -> torch.Tensor:
    block_scale = torch.exp2(torch.randint(-40, 12, (*shape[:-1], shape[-1] // 16)).float())
    return torch.randn(shape) * block_scale.repeat_interleave(16, dim=-1)


DISTRIBUTIONS: list[Callable[[tuple[int, ...]], torch.Tensor]] = [
    normal,
    heavy_tailed,
    on_ties,
    with_specials,
    wide_range,
]


@each_recipe
@pytest.mark.parametrize("make", DISTRIBUTIONS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("g", [1.0, None, 0.0123, 2.0**-20], ids=["1", "amax", "odd", "tiny"])
def test_quantize_equals_brute_force(
    recipe: nvfp4.Recipe, make: Callable[[tuple[int, ...]], torch.Tensor], g: float | None
) -> None:
    torch.manual_seed(0)
    x = make((6, 64))
    amax = x[x.isfinite()].abs().max()
    check(x, nvfp4.global_scale_from_amax(amax, recipe) if g is None else g, recipe)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_quantize_every_float_dtype(recipe: nvfp4.Recipe, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(torch.randn(3, 2, 32).to(dtype), 0.0031, recipe)


def odd_scales(count: int) -> np.ndarray:
    """float32 scales with full mantissas, which show the order of operations."""
    return np.random.default_rng(0).uniform(0.5, 2, count).astype(np.float32) / np.float32(2688)


@pytest.mark.parametrize("byte", [0x31, 0x38, 0x3D, 0x47, 0x76])
def test_quantize_divides_once_by_the_rounded_product(byte: int) -> None:
    ties = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    for g in odd_scales(40):
        step = np.float32(brute_force.e4m3_value(byte)) * g
        x = brute_force.with_neighbours(ties * step)
        check(torch.cat([x, -x], dim=1), float(g), "amax6")


@each_recipe
def test_quantize_divides_amax_once_by_the_rounded_product(recipe: nvfp4.Recipe) -> None:
    magnitudes = np.array([float(m) for m in brute_force.e4m3_table()], np.float32)
    ties = (magnitudes[40:90] + magnitudes[41:91]) / np.float32(2)
    for g in odd_scales(10):
        amax = brute_force.with_neighbours(ties * (np.float32(6) * g)).flatten()
        check(torch.nn.functional.pad(amax[:, None], (3, 12)), float(g), recipe)


SPECIALS = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 6.0, -5.0, 2.0**-149])


@each_recipe
@settings(deadline=None, max_examples=150)
@given(
    block=st.lists(
        st.one_of(st.floats(width=32), st.floats(-8, 8, width=32), SPECIALS),
        min_size=16,
        max_size=16,
    ),
    g=st.floats(2.0**-60, 2.0**60, width=32),
)
def test_quantize_any_block(recipe: nvfp4.Recipe, block: list[float], g: float) -> None:
    check(torch.tensor(block), g, recipe)


@settings(deadline=None, max_examples=60)
@given(scale=st.integers(1, 0x7E), seed=st.integers(0, 999), exponent=st.integers(-30, 30))
def test_quantize_inverts_dequantize(scale: int, seed: int, exponent: int) -> None:
    codes = torch.randint(0, 16, (16,), generator=torch.Generator().manual_seed(seed))
    codes[seed % 16] = 7
    codes[codes == 8] = 0
    data = torch.tensor(brute_force.pack(codes.tolist()), dtype=torch.uint8)
    scales = torch.tensor([scale], dtype=torch.uint8)
    g = 2.0**exponent
    data_again, scales_again = nvfp4.quantize(nvfp4.dequantize(data, scales, g), g)
    assert torch.equal(data_again, data)
    assert torch.equal(scales_again.view(torch.uint8), scales)


def test_quantize_golden_ties() -> None:
    block = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    codes, scale = codes_and_scale([*block, *[-v for v in block]])
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]
    assert scale == 0x38


def test_quantize_signs_of_zeros_and_of_what_rounds_to_zero() -> None:
    codes, _ = codes_and_scale([6.0, -0.0, 0.0, -(2.0**-149), 2.0**-149, -0.2, 0.2], g=16.0)
    assert codes[1:7] == [0, 0, 8, 0, 8, 0]


@each_recipe
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_quantize_zero_blocks(recipe: nvfp4.Recipe, zero: float) -> None:
    x = torch.randn(2, 48)
    x[:, 16:32] = zero
    data, scales = nvfp4.quantize(x, 0.01, recipe)
    assert not scales.view(torch.uint8)[:, 1].any()
    assert not data[:, 8:16].any()
    assert scales.view(torch.uint8)[:, 0::2].all()


@each_recipe
def test_quantize_zero_tensor(recipe: nvfp4.Recipe) -> None:
    x = torch.zeros(3, 32)
    g = nvfp4.global_scale_from_amax(x.abs().max(), recipe)
    data, scales = nvfp4.quantize(x, g, recipe)
    assert g.item() == 1
    assert not data.any()
    assert not scales.view(torch.uint8).any()
    assert torch.equal(nvfp4.dequantize(data, scales, g), x)


@each_recipe
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_quantize_nan_marks_its_block_alone(recipe: nvfp4.Recipe, nan: float) -> None:
    x = torch.randn(2, 48)
    x[0, 20] = nan
    x[0, 21] = math.inf
    data, scales = nvfp4.quantize(x, 0.01, recipe)
    assert (scales.view(torch.uint8) == NAN_SCALE).tolist() == [[False, True, False], [False] * 3]
    assert not data[0, 8:16].any()
    back = nvfp4.dequantize(data, scales, 0.01)
    assert back[0, 16:32].isnan().all()
    assert back.isnan().sum() == 16


@each_recipe
def test_quantize_infinity_saturates(recipe: nvfp4.Recipe) -> None:
    x = torch.zeros(16)
    x[3], x[5], x[7] = math.inf, -math.inf, 448.0
    data, scales = nvfp4.quantize(x, 1.0, recipe)
    assert scales.view(torch.uint8).tolist() == [0x7E]
    expected = torch.zeros(16)
    expected[3], expected[5], expected[7] = 2688.0, -2688.0, 448.0
    assert torch.equal(nvfp4.dequantize(data, scales, 1.0), expected)


@pytest.mark.parametrize("exponent", range(-16, -5))
def test_quantize_subnormal_scales_never_round_to_zero(exponent: int) -> None:
    x = torch.linspace(-1, 1, 16) * 6 * 2.0**exponent
    check(x, 1.0, "amax6")
    _, scales = nvfp4.quantize(x, 1.0)
    assert int(scales.view(torch.uint8)) >= 1


def test_quantize_scale_is_clamped_before_the_cast() -> None:
    codes, scale = codes_and_scale([1e6, -1e6, 1344.0])
    assert scale == 0x7E
    assert codes[:3] == [7, 15, 5]


def test_quantized_zeros_stay_zero_where_scales_underflow() -> None:
    codes, scale = codes_and_scale([2.0**-149, 0.0, -(2.0**-149), -0.0], g=2.0**-141)
    assert scale == 1
    assert codes[:4] == [7, 0, 15, 0]


def test_quantized_zeros_of_a_subnormal_tensor_stay_zero() -> None:
    x = torch.zeros(32)
    x[0], x[16] = 2.0**-137, 2.0**-149
    g = nvfp4.global_scale_from_amax(x.max())
    data, scales = nvfp4.quantize(x, g)
    assert not nvfp4.dequantize(data, scales, g)[x == 0].any()


def test_quantize_infinity_saturates_under_a_huge_global_scale() -> None:
    data, scales = nvfp4.quantize(torch.tensor([math.inf] + [1.0] * 15), 1e38)
    assert not nvfp4.dequantize(data, scales, 1.0).isnan().any()


@each_recipe
@pytest.mark.parametrize("shape", [(0, 16), (2, 0), (3, 0, 32), (0,), (0, 2, 0)])
def test_quantize_empty(recipe: nvfp4.Recipe, shape: tuple[int, ...]) -> None:
    data, scales = nvfp4.quantize(torch.empty(shape), 1.0, recipe)
    assert data.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 16)
    assert nvfp4.dequantize(data, scales, 1.0).shape == shape


@each_recipe
def test_quantize_non_contiguous(recipe: nvfp4.Recipe) -> None:
    torch.manual_seed(2)
    wide = torch.randn(32, 3, 24)
    for x in (
        wide.transpose(0, 2)[:, :, 16:],
        wide[::2, ::2, 8:24],
        wide[:, :1, :16].expand(-1, 3, -1),
    ):
        check(x, 0.002, recipe)
        contiguous = nvfp4.quantize(x.contiguous(), 0.002, recipe)
        for one, other in zip(nvfp4.quantize(x, 0.002, recipe), contiguous, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@each_recipe
def test_quantize_leaves_its_input_alone(recipe: nvfp4.Recipe) -> None:
    x = torch.randn(4, 32)
    before = x.clone()
    nvfp4.quantize(x, 0.01, recipe)
    assert torch.equal(x, before)


@each_recipe
@pytest.mark.parametrize("shape", [(5, 1), (3, 1, 1), (3, 5, 1), (1, 1)])
def test_quantize_global_scale_per_row(recipe: nvfp4.Recipe, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 5, 32)
    g = torch.rand(shape) * 0.01 + 1e-4
    check(x, g, recipe)
    data, scales = nvfp4.quantize(x, g, recipe)
    rows = g.expand(3, 5, 1)
    for i in range(3):
        for j in range(5):
            one = nvfp4.quantize(x[i, j], rows[i, j].item(), recipe)
            assert torch.equal(one[0], data[i, j])
            assert torch.equal(one[1].view(torch.uint8), scales[i, j].view(torch.uint8))
    back = nvfp4.dequantize(data, scales, g)
    exact = nvfp4.dequantize(data, scales, 1.0)
    assert torch.equal(back, exact * rows)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("g", [0.1, 0.0037, 1.0])
def test_global_scale_float_and_one_element_tensors_agree(
    recipe: nvfp4.Recipe, g: float, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 32)
    data, scales = nvfp4.quantize(x, g, recipe)
    values = nvfp4.dequantize(data, scales, g, dtype)
    for tensor in (
        torch.tensor(g),
        torch.tensor([g]),
        torch.tensor([[g]]),
        torch.tensor(g).double(),
    ):
        data_again, scales_again = nvfp4.quantize(x, tensor, recipe)
        assert torch.equal(data_again, data)
        assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(nvfp4.dequantize(data, scales, tensor, dtype), values)


@pytest.mark.parametrize(
    ("amax", "recipe", "expected"),
    [
        (0.0, "amax6", 1.0),
        (0.0, "four_over_six", 1.0),
        (2688.0, "amax6", 1.0),
        (1536.0, "four_over_six", 1.0),
        (3, "amax6", float(np.float32(3) / np.float32(2688))),
        (1.1, "amax6", float(np.float32(1.1) / np.float32(2688))),
        (1.1, "four_over_six", float(np.float32(1.1) / np.float32(1536))),
        (2.0**-149, "amax6", 1.0),
    ],
)
def test_global_scale_from_amax(amax: float, recipe: nvfp4.Recipe, expected: float) -> None:
    scale = nvfp4.global_scale_from_amax(amax, recipe)
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert scale.item() == expected
    tensor = nvfp4.global_scale_from_amax(torch.tensor([[amax]], dtype=torch.float32), recipe)
    assert tensor.tolist() == [[expected]]


def test_global_scale_from_amax_of_mixed_rows() -> None:
    amax = torch.tensor([[0.0], [2688.0], [1.0]], dtype=torch.bfloat16)
    scale = nvfp4.global_scale_from_amax(amax)
    assert scale.tolist() == [[1.0], [1.0], [float(np.float32(1) / np.float32(2688))]]


def test_global_scale_does_not_depend_on_the_default_dtype() -> None:
    expected = nvfp4.global_scale_from_amax(1.1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scale = nvfp4.global_scale_from_amax(1.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.item() == expected.item()


@each_recipe
def test_quantize_does_not_depend_on_the_default_dtype(recipe: nvfp4.Recipe) -> None:
    x = torch.randn(4, 32)
    data, scales = nvfp4.quantize(x, 0.0123, recipe)
    values = nvfp4.dequantize(data, scales, 0.0123)
    torch.set_default_dtype(torch.bfloat16)
    try:
        data_again, scales_again = nvfp4.quantize(x, 0.0123, recipe)
        values_again = nvfp4.dequantize(data, scales, 0.0123)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(data_again, data)
    assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(values_again, values)


@pytest.mark.parametrize("amax", [-1.0, math.inf, math.nan])
def test_global_scale_from_amax_refuses(amax: float) -> None:
    with pytest.raises(ValueError, match="amax"):
        nvfp4.global_scale_from_amax(amax)


@pytest.mark.parametrize("shape", [(15,), (2, 8), (4, 17), ()])
def test_quantize_refuses_sizes_that_are_not_whole_blocks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="16"):
        nvfp4.quantize(torch.ones(shape), 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_quantize_refuses_integers(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype)):
        nvfp4.quantize(torch.zeros(16, dtype=dtype), 1.0)


@pytest.mark.parametrize("g", [0.0, -1.0, math.nan, math.inf, 1e-60, 1e60])
def test_quantize_refuses_wrong_global_scales(g: float) -> None:
    with pytest.raises(ValueError, match="global_scale"):
        nvfp4.quantize(torch.ones(16), g)


def test_unknown_recipe_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"amax6.*four_over_six.*'amax5'"):
        nvfp4.quantize(torch.ones(16), 1.0, "amax5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe"):
        nvfp4.global_scale_from_amax(1.0, "amax5")  # type: ignore[arg-type]


@each_recipe
@pytest.mark.parametrize("shape", [(2,), (3, 2)], ids=["rows-1d", "no-last-axis"])
def test_quantize_refuses_global_scales_that_are_not_per_row(
    recipe: nvfp4.Recipe, shape: tuple[int, ...]
) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        nvfp4.quantize(torch.ones(3, 2, 32), torch.ones(shape), recipe)
