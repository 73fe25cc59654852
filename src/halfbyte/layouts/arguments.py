"""Checks of public functions' arguments; errors are one line that names the argument."""

import ctypes
import math
import operator

import torch


def check_tensors(**tensors: object) -> None:
    """Raise ValueError for an argument that is not a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")


def integer(name: str, x: int) -> int:
    """An integer of any type (NumPy's, a one-element tensor) as Python's int.

    Raises:
        ValueError: not an integer.
    """
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {x!r}") from None


def finite_number(name: str, x: float, expected: str = "a finite number") -> float:
    """A number of any type (NumPy's, a one-element tensor) as Python's float.

    Raises:
        ValueError: not a number (strings are not converted), or not finite.
    """
    try:
        number = math.nan if isinstance(x, str) else float(x)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {expected}, got {x!r}")
    return number


def float32_number(name: str, x: float, expected: str = "a finite number in float32") -> float:
    """As `finite_number`, also finite in float32, in which kernels compute.

    Raises:
        ValueError: not a number, or not finite in float32.
    """
    number = finite_number(name, x, expected)
    if not math.isfinite(ctypes.c_float(number).value):
        raise ValueError(f"{name}: expected {expected}, got {x!r}")
    return number
