"""Arguments of public functions that are not what they must be: one line that names them."""

import ctypes
import math
import operator

import torch


def check_tensors(**tensors: object) -> None:
    """Raise ValueError for one that is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")


def integer(name: str, x: int) -> int:
    """An integer of any kind (NumPy's, a tensor of one) as Python's.

    Raises:
        ValueError: it is none.
    """
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {x!r}") from None


def finite_number(name: str, x: float, expected: str = "a finite number") -> float:
    """A number of any kind (NumPy's, a tensor of one) as Python's.

    Raises:
        ValueError: it is none, not even a text that spells one, or is not finite.
    """
    try:
        number = math.nan if isinstance(x, str) else float(x)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {expected}, got {x!r}")
    return number


def float32_number(name: str, x: float, expected: str = "a finite number in float32") -> float:
    """A number of any kind as Python's, which float32, that kernels compute in, has as well.

    Raises:
        ValueError: it is none, or is not finite there.
    """
    number = finite_number(name, x, expected)
    if not math.isfinite(ctypes.c_float(number).value):
        raise ValueError(f"{name}: expected {expected}, got {x!r}")
    return number
