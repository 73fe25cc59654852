"""Settings for all tests: one thread each, poisoned memory, GPU tests only where there is a GPU."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._device

from each_value import leave_out_combinations
from halfbyte.kernels.cpu.library import LEVELS, set_level
from halfbyte.kernels.runtime import devices

# Commands that tests start must find the package, installed or not.
_SOURCES = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SOURCES, os.environ.get("PYTHONPATH"))))

# Shells start background jobs with SIGINT ignored, and children would inherit that: tests of Ctrl-C
# would wait for nothing. A handler is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch remembers its constructors when `torch.device(...)` is first entered as a context; that must
# not be while they are poisoned, or "meta" would be ignored.
torch.utils._device._device_constructors()

# Workers share the cores, and one BLAS thread each keeps them from waiting for one another.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-value",
        action="store_true",
        help="run a small set of a test's parameter combinations in which every value occurs",
    )


@pytest.hookimpl(trylast=True)  # after `-m`: values that only slow cases have are left to these
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if config.getoption("--each-value"):
        leave_out_combinations(config, items)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set of the C++ kernels, which then run on it."""
    try:
        if set_level(request.param) != request.param:
            pytest.skip(f"this CPU has no {request.param}")
        yield request.param
    finally:
        set_level(None)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.uint8:
        return tensor.fill_(0xFF)
    if tensor.dtype == torch.int32:
        return tensor.fill_(0x3FFFFFFF)
    return tensor


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor if tensor.requires_grad or tensor.is_meta else _poison(tensor)

    return allocate_poisoned


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill `torch.empty` with NaN, so that reads of uninitialized memory show."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
    if devices._empty_on_current_gpu:
        poisoned = _poisoned(devices._empty_on_current_gpu)
        monkeypatch.setattr(devices, "_empty_on_current_gpu", poisoned)


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul for Triton's interpreter in which a row's sums do not depend on its position.

    As on a GPU. On some CPUs NumPy's matmul sums the last rows of a tile in another order.
    """
    monkeypatch.setattr(np, "matmul", partial(np.einsum, "mk,kn->mn"))
