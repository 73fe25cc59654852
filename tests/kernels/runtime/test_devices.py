"""Which GPU is current while a kernel is launched, and memory there, on machines without one."""

from typing import Any

import pytest
import torch

from halfbyte.kernels.runtime import devices
from halfbyte.kernels.runtime.devices import Memory, allocate, current_device


def test_a_gpu_is_entered_only_if_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    for device in (torch.empty(1).get_device(), 1):
        with current_device(device):
            assert not entered
    current_device(2)
    assert entered == [2]


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (4, 0, 3), (0,)])
def test_contiguous_memory(shape: tuple[int, ...]) -> None:
    memory = Memory.contiguous(shape, torch.float16)
    assert memory == (shape, torch.empty(shape).stride(), torch.float16)


def test_memory_is_allocated_on_the_requested_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a context manager if it is the current GPU."""
    empty_strided, requested = torch.empty_strided, []

    def elsewhere(shape: Any, stride: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        requested.append(device)
        return empty_strided(shape, stride, dtype=dtype)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)

    def direct(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return empty_strided(shape, stride, dtype=dtype)

    monkeypatch.setattr(devices, "_empty_on_current_gpu", direct)
    monkeypatch.setattr(torch, "empty_strided", elsewhere)
    memory = Memory.contiguous((3, 4), torch.int32)
    for device in (1, 2):
        made = allocate(memory, device)
        assert (made.shape, made.stride(), made.dtype) == memory
    assert requested == [torch.device("cuda", 2)]
    monkeypatch.setattr(devices, "_empty_on_current_gpu", None)
    allocate(memory, 1)
    assert requested[1:] == [torch.device("cuda", 1)]


@pytest.mark.gpu
def test_gpu_memory() -> None:
    device = torch.cuda.current_device()
    with torch.inference_mode():
        made = allocate(Memory.contiguous((3, 4), torch.bfloat16), device)
        wanted = torch.empty(3, 4, dtype=torch.bfloat16, device=torch.device("cuda", device))
    for attribute in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(made, attribute) == getattr(wanted, attribute)
    assert made.stride() == wanted.stride()
    assert made.is_inference()
