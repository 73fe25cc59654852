"""`halfbyte.numerics.e2m1`, code for code."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.numerics import e2m1
from numerics import brute_force

GOLDEN_TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def codes_of(*values: float) -> list[int]:
    return e2m1.encode(torch.tensor(values, dtype=torch.float32)).tolist()


def neighbours(value: float) -> tuple[float, float]:
    x = np.float32(value)
    return float(np.nextafter(x, np.float32(-np.inf))), float(np.nextafter(x, np.float32(np.inf)))


@pytest.mark.parametrize(("tie", "code"), GOLDEN_TIES.items())
def test_encode_tie_goes_to_the_even_code(tie: float, code: int) -> None:
    assert codes_of(tie, -tie) == [code, code | 8]
    assert code % 2 == 0


@pytest.mark.parametrize("tie", GOLDEN_TIES)
def test_encode_neighbours_of_ties_go_to_the_nearer_value(tie: float) -> None:
    below, above = neighbours(tie)
    low = max(c for c in range(8) if brute_force.E2M1_MAGNITUDES[c] < tie)
    assert codes_of(below, above) == [low, low + 1]
    assert codes_of(-below, -above) == [low | 8, (low + 1) | 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_ties_and_values_of_other_dtypes(dtype: torch.dtype) -> None:
    ties = torch.tensor([*GOLDEN_TIES], dtype=dtype)
    assert e2m1.encode(ties).tolist() == list(GOLDEN_TIES.values())
    values = torch.tensor(brute_force.E2M1_MAGNITUDES, dtype=dtype)
    assert e2m1.encode(values).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0),
        (-0.0, 0),
        (-0.1, 8),
        (-0.25, 8),
        (-(2.0**-149), 8),
        (2.0**-149, 0),
        (6.0, 7),
        (-6.0, 15),
        (6.1, 7),
        (-1e30, 15),
        (math.inf, 7),
        (-math.inf, 15),
        (math.nan, 7),
    ],
)
def test_encode_zeros_and_saturation(x: float, code: int) -> None:
    assert codes_of(x) == [code]


def test_encode_every_float16() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[~torch.isnan(x)][::7]
    expected = [brute_force.e2m1_code(v) for v in x.double().tolist()]
    assert e2m1.encode(x).tolist() == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False, min_value=-7, max_value=7), min_size=1))
def test_encode_equals_nearest_value_search(values: list[float]) -> None:
    assert codes_of(*values) == [brute_force.e2m1_code(v) for v in values]


def test_encode_keeps_shape_and_dtype() -> None:
    codes = e2m1.encode(torch.zeros(2, 0, 3))
    assert (codes.shape, codes.dtype) == ((2, 0, 3), torch.uint8)
    assert e2m1.encode(torch.tensor(-3.0)).item() == 13


def test_encode_reads_non_contiguous_tensors() -> None:
    x = torch.linspace(-7, 7, 48).reshape(6, 8).t()[::2]
    expected = [[brute_force.e2m1_code(v) for v in row] for row in x.tolist()]
    assert e2m1.encode(x).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_decode_every_code(dtype: torch.dtype) -> None:
    values = e2m1.decode(torch.arange(16, dtype=torch.uint8), dtype)
    expected = [brute_force.e2m1_value(code) for code in range(16)]
    assert values.dtype == dtype
    assert values.tolist() == expected
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8


def test_values_table() -> None:
    assert tuple(brute_force.e2m1_value(code) for code in range(16)) == e2m1.E2M1_VALUES


def test_pack_puts_the_even_element_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [7, 8, 0, 9]], dtype=torch.uint8)
    assert e2m1.pack(codes).tolist() == [[0x21, 0x0F], [0x87, 0x90]]


def test_unpack_every_byte() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    codes = e2m1.unpack(data)
    assert codes.tolist() == [nibble for byte in range(256) for nibble in (byte % 16, byte // 16)]
    assert torch.equal(e2m1.pack(codes), data)


def test_unpack_inverts_pack_on_strided_codes() -> None:
    codes = torch.randint(0, 16, (4, 3, 10), dtype=torch.uint8).transpose(0, 1)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)


def test_pack_of_nothing() -> None:
    assert e2m1.pack(torch.zeros(3, 0, dtype=torch.uint8)).shape == (3, 0)
    assert e2m1.unpack(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0, 8)


def test_pack_refuses_an_odd_number_of_codes() -> None:
    with pytest.raises(ValueError, match="codes"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


def test_decode_packed_every_byte() -> None:
    values = e2m1.decode_packed(torch.arange(256, dtype=torch.uint8)[None])
    expected = [brute_force.e2m1_value(nibble) for b in range(256) for nibble in (b % 16, b // 16)]
    assert values.tolist() == [expected]
    assert torch.equal(torch.signbit(values[0]), torch.signbit(torch.tensor(expected)))


def test_tables_are_built_beside_the_data_under_a_default_device() -> None:
    spec = importlib.util.spec_from_file_location("e2m1_with_cold_caches", e2m1.__file__)
    assert spec is not None
    assert spec.loader is not None
    cold = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cold)
    x = torch.tensor([0.5, -6.0])
    with torch.device("meta"):
        codes = cold.encode(x)
        values = cold.decode(codes)
    assert codes.tolist() == [1, 15]
    assert torch.equal(values, x)
