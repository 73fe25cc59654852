"""`halfbyte.numerics.fp8`: one scale per tensor, a true division, one rounding."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import fp8
from numerics import brute_force

TO_BYTE: dict[str, Callable[[float], int]] = {
    "e4m3": brute_force.e4m3_byte,
    "e5m2": brute_force.e5m2_byte,
}
TO_VALUE: dict[str, Callable[[int], float]] = {
    "e4m3": brute_force.e4m3_value,
    "e5m2": brute_force.e5m2_value,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
each_format = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def check(x: torch.Tensor, scale: float, fmt: fp8.Fp8Format) -> None:
    with np.errstate(all="ignore"):
        quotients = [v / np.float32(scale) for v in brute_force.float32_scalars(x)]
    expected = [TO_BYTE[fmt](float(q)) for q in quotients]
    data = fp8.quantize(x, scale, fmt)
    assert (data.dtype, data.shape) == (torch.uint8, x.shape)
    assert data.flatten().tolist() == expected


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 1 / 3])
def test_quantize_equals_brute_force(fmt: fp8.Fp8Format, dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(8, 25, generator=torch.Generator().manual_seed(0)) * 40
    check(x.to(dtype), scale, fmt)


@each_format
def test_quantize_divides_by_the_scale(fmt: fp8.Fp8Format) -> None:
    table = {"e4m3": brute_force.e4m3_table(), "e5m2": brute_force.e5m2_table()}[fmt]
    ties = np.array([float(a + b) / 2 for a, b in pairwise(table)], np.float32)
    for scale in np.random.default_rng(0).uniform(0.5, 2, 20).astype(np.float32):
        check(brute_force.with_neighbours(ties * scale), float(scale), fmt)


@each_format
@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.floats(width=32), min_size=1), scale=st.floats(2.0**-60, 2.0**60, width=32)
)
def test_quantize_any_values(fmt: fp8.Fp8Format, values: list[float], scale: float) -> None:
    check(torch.tensor(values), scale, fmt)


@each_format
def test_quantize_saturates_and_marks_nan(fmt: fp8.Fp8Format) -> None:
    x = torch.tensor([math.inf, -math.inf, 3e38, math.nan, -0.0])
    data = fp8.quantize(x, 0.5, fmt)
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt]
    assert data.tolist() == [top, top | 0x80, top, 0x7F, 0x80]
    back = fp8.dequantize(data, 0.5, fmt)
    assert back[:3].tolist() == [LARGEST[fmt] / 2, -LARGEST[fmt] / 2, LARGEST[fmt] / 2]
    assert back[3].isnan()


@each_format
@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3])
def test_dequantize_every_byte(fmt: fp8.Fp8Format, scale: float) -> None:
    bytes_ = [b for b in range(256) if math.isfinite(TO_VALUE[fmt](b))]
    expected = [float(np.float32(TO_VALUE[fmt](b)) * np.float32(scale)) for b in bytes_]
    data = torch.tensor(bytes_, dtype=torch.uint8)
    values = fp8.dequantize(data, scale, fmt)
    assert values.dtype == torch.float32
    assert values.tolist() == expected
    for dtype in (torch.bfloat16, torch.float16):
        rounded = fp8.dequantize(data, scale, fmt, dtype)
        assert torch.equal(rounded, torch.tensor(expected).to(dtype))


@each_format
def test_scale_float_and_tensors_agree(fmt: fp8.Fp8Format) -> None:
    x = torch.randn(3, 4)
    data = fp8.quantize(x, 0.1, fmt)
    for scale in (torch.tensor(0.1), torch.tensor([0.1]), torch.full((3, 1), 0.1)):
        assert torch.equal(fp8.quantize(x, scale, fmt), data)
        assert torch.equal(fp8.dequantize(data, scale, fmt), fp8.dequantize(data, 0.1, fmt))


@each_format
def test_scale_per_row(fmt: fp8.Fp8Format) -> None:
    x = torch.randn(3, 4)
    scale = torch.tensor([[0.1], [0.02], [3.0]])
    data = fp8.quantize(x, scale, fmt)
    for row in range(3):
        assert torch.equal(data[row], fp8.quantize(x[row], scale[row].item(), fmt))


@each_format
def test_scale_from_amax(fmt: fp8.Fp8Format) -> None:
    expected = float(np.float32(1.1) / np.float32(LARGEST[fmt]))
    scale = fp8.scale_from_amax(1.1, fmt)
    assert (scale.dtype, scale.item()) == (torch.float32, expected)
    assert fp8.scale_from_amax(0.0, fmt).item() == 1
    rows = fp8.scale_from_amax(torch.tensor([[0.0], [LARGEST[fmt]]], dtype=torch.bfloat16), fmt)
    assert rows.tolist() == [[1.0], [1.0]]


@each_format
def test_scale_from_amax_does_not_depend_on_the_default_dtype(fmt: fp8.Fp8Format) -> None:
    expected = fp8.scale_from_amax(1.1, fmt)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scale = fp8.scale_from_amax(1.1, fmt)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.item() == expected.item()


@each_format
def test_scale_from_amax_maps_max_to_the_largest_code(fmt: fp8.Fp8Format) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    data = fp8.quantize(x, fp8.scale_from_amax(x.abs().max(), fmt), fmt)
    assert int(data[x.abs().argmax()]) & 0x7F == {"e4m3": 0x7E, "e5m2": 0x7B}[fmt]


@each_format
def test_quantize_empty_and_strided(fmt: fp8.Fp8Format) -> None:
    assert fp8.quantize(torch.empty(2, 0), 1.0, fmt).shape == (2, 0)
    check(torch.randn(6, 8).t()[::2], 0.01, fmt)
