"""Which launches of Triton kernels overlap with the previous kernel."""

import pytest
import torch

pytest.importorskip("triton")

from halfbyte.kernels.runtime import triton_overlap
from halfbyte.kernels.runtime.triton_overlap import overlap_options


@pytest.mark.parametrize(
    ("device", "capability", "hip", "overlaps"),
    [
        (-1, 90, None, False),
        (0, 80, None, False),
        (0, 90, None, True),
        (0, 120, None, True),
        (0, 94, "7.0", False),
    ],
    ids=["CPU", "SM80", "SM90", "SM120", "AMD"],
)
def test_launches_overlap_from_sm90_on(
    device: int, capability: int, hip: str | None, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_overlap, "compute_capability_of_gpu", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    overlap_options.cache_clear()
    expected = {"overlaps": True, "launch_pdl": True} if overlaps else {"overlaps": False}
    assert overlap_options(device) == expected
    overlap_options.cache_clear()
