"""Checks of arguments that all layers share."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.layouts.arguments import check_tensors, finite_number, float32_number, integer

FLOAT32_MAX = float(torch.finfo(torch.float32).max)


def test_tensors_alone_are_tensors() -> None:
    check_tensors(x=torch.zeros(1), y=torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="y: expected a tensor, got list"):
        check_tensors(x=torch.zeros(1), y=[0.0])


@pytest.mark.parametrize("x", [3, np.int64(3), torch.tensor(3)])
def test_integers_of_any_kind(x: Any) -> None:
    assert type(integer("x", x)) is int
    assert integer("x", x) == 3


@pytest.mark.parametrize("x", [3.0, "3", None, torch.tensor(3.0)])
def test_what_is_no_integer(x: Any) -> None:
    with pytest.raises(ValueError, match="x: expected an integer, got"):
        integer("x", x)


@pytest.mark.parametrize("number", [finite_number, float32_number])
@pytest.mark.parametrize("x", [-2.5, np.float32(-2.5), torch.tensor([-2.5])])
def test_numbers_of_any_kind(number: Any, x: Any) -> None:
    assert type(number("x", x)) is float
    assert number("x", x) == -2.5


@pytest.mark.parametrize("number", [finite_number, float32_number])
@pytest.mark.parametrize("x", ["2.5", None, [1.0], math.nan, -math.inf, 10**400, torch.zeros(2)])
def test_what_is_no_finite_number(number: Any, x: Any) -> None:
    with pytest.raises(ValueError, match="x: expected five, got"):
        number("x", x, "five")


def test_numbers_beyond_float32() -> None:
    assert float32_number("x", FLOAT32_MAX) == FLOAT32_MAX
    assert finite_number("x", 2 * FLOAT32_MAX) == 2 * FLOAT32_MAX
    with pytest.raises(ValueError, match="x: expected a finite number in float32, got"):
        float32_number("x", 2 * FLOAT32_MAX)
