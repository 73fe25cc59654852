"""Which GPU is current while a kernel is launched, on machines without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.kernels.devices import current_device


def on(device: torch.device) -> Any:
    """What looks like a tensor there."""
    return SimpleNamespace(device=device, is_cuda=device.type == "cuda")


def test_a_gpu_is_entered_only_if_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        with current_device(on(device)):
            assert not entered
    other = torch.device("cuda", 2)
    current_device(on(other))
    assert entered == [other]
