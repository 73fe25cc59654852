"""`e4m3`, `e5m2` and `e8m0`: every byte, every tie, the smallest and largest values."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import e4m3, e5m2, e8m0
from numerics import brute_force


class Format(NamedTuple):
    module: ModuleType
    to_byte: Callable[[float], int]
    to_value: Callable[[int], float]
    magnitudes: Sequence[Fraction]


FORMATS = {
    "e4m3": Format(e4m3, brute_force.e4m3_byte, brute_force.e4m3_value, brute_force.e4m3_table()),
    "e5m2": Format(e5m2, brute_force.e5m2_byte, brute_force.e5m2_value, brute_force.e5m2_table()),
}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def encoded(fmt: Format, values: np.ndarray | list[float]) -> list[int]:
    return fmt.module.encode(torch.tensor(values, dtype=torch.float32)).tolist()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_every_byte(fmt: Format, dtype: torch.dtype) -> None:
    values = fmt.module.decode(torch.arange(256, dtype=torch.uint8), dtype)
    expected = torch.tensor([fmt.to_value(byte) for byte in range(256)])
    assert values.dtype == dtype
    assert torch.equal(values.isnan(), expected.isnan())
    valid = ~expected.isnan()
    assert torch.equal(values.float()[valid], expected[valid])
    assert torch.equal(torch.signbit(values)[valid], torch.signbit(expected)[valid])


@each_format
def test_encode_inverts_decode(fmt: Format) -> None:
    finite = [byte | sign for sign in (0, 0x80) for byte in range(len(fmt.magnitudes))]
    bits = fmt.module.encode(fmt.module.decode(torch.tensor(finite, dtype=torch.uint8)))
    assert bits.dtype == torch.uint8
    assert bits.tolist() == finite


@each_format
@pytest.mark.parametrize("sign", [1, -1])
def test_encode_ties_and_their_neighbours(fmt: Format, sign: int) -> None:
    ties = np.array([float(a + b) / 2 for a, b in pairwise(fmt.magnitudes)], np.float32)
    low = np.arange(len(ties)) | (0x80 if sign < 0 else 0)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))
    assert encoded(fmt, sign * ties) == (low + low % 2).tolist()
    assert encoded(fmt, sign * below) == low.tolist()
    assert encoded(fmt, sign * above) == (low + 1).tolist()


@each_format
@pytest.mark.parametrize("factor", [1.01, 1.0625, 1.1, 2.0, 1e33, math.inf])
def test_encode_saturates_and_never_writes_infinity(fmt: Format, factor: float) -> None:
    top = len(fmt.magnitudes) - 1
    x = float(fmt.magnitudes[-1]) * factor
    assert encoded(fmt, [x, -x]) == [top, top | 0x80]


@each_format
def test_encode_subnormals_and_zeros(fmt: Format) -> None:
    smallest = float(fmt.magnitudes[1])
    x = [0.0, smallest, smallest / 2, smallest * 0.50001, smallest * 1.5, 2.0**-149]
    assert encoded(fmt, x) == [0, 1, 0, 1, 2, 0]
    assert encoded(fmt, [-v for v in x]) == [0x80, 0x81, 0x80, 0x81, 0x82, 0x80]


@each_format
def test_encode_nan_of_either_sign_is_7f(fmt: Format) -> None:
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32)
    assert fmt.module.encode(nans.view(torch.float32)).tolist() == [0x7F] * 3


@each_format
@settings(deadline=None, max_examples=100)
@given(values=st.lists(st.floats(width=32), min_size=1))
def test_encode_equals_nearest_value_search(fmt: Format, values: list[float]) -> None:
    assert encoded(fmt, values) == [fmt.to_byte(v) for v in values]


@each_format
def test_encode_shapes_and_strides(fmt: Format) -> None:
    assert fmt.module.encode(torch.zeros(2, 0)).shape == (2, 0)
    assert fmt.module.encode(torch.tensor(1.0)).shape == ()
    x = torch.linspace(-3, 3, 12).reshape(3, 4).t()
    assert fmt.module.encode(x).tolist() == [[fmt.to_byte(v) for v in row] for row in x.tolist()]


def test_constants_are_the_ends_of_the_tables() -> None:
    assert float(brute_force.e4m3_table()[-1]) == e4m3.E4M3_MAX == 448
    assert float(brute_force.e4m3_table()[1]) == e4m3.E4M3_MIN_SUBNORMAL == 2.0**-9
    assert float(brute_force.e5m2_table()[-1]) == e5m2.E5M2_MAX == 57344


def test_e8m0_decode_every_byte() -> None:
    values = e8m0.decode(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values[:255].double().tolist() == [brute_force.e8m0_value(b) for b in range(255)]
    assert values[0].item() == 2.0**-127
    assert values[255].isnan()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_e8m0_encode_exponents_of_any_int_dtype(dtype: torch.dtype) -> None:
    bits = e8m0.encode(torch.arange(-127, 128).to(dtype))
    assert bits.dtype == torch.uint8
    assert bits.tolist() == list(range(255))


def test_e8m0_encode_clamps() -> None:
    assert e8m0.encode(torch.tensor([-300, -128, 128, 300])).tolist() == [0, 0, 254, 254]
