"""Rings filled from pages by one kernel: interpreted on a CPU, run on a GPU."""

import sys
from typing import Any

import pytest
import torch

from attention.cases import Case, make_case
from gpu_sync import waiting_is_an_error
from halfbyte.attention.recent.fill import Rings, fill_rings, unpack_into_rings
from halfbyte.kvcache.recent_step import LayerPages, MissingTokens, RecentStep
from kvcache.transforms import on

pytest.importorskip("triton")

from triton_interpreter import interpreted

ENTRIES = 6
CASES: dict[str, dict[str, Any]] = {
    "recipe": {"transform": {}},
    "first-token-and-odd-sizes": {"transform": {}, "head_size": 96, "head_size_v": 32},
    "not-rotated": {"transform": {"rotate": False}},
    "plain": {"k_dtype": "nvfp4", "v_dtype": "fp8"},
}
LENGTHS = (23, 40, 90, 12)


def step_and_pages(case: Case, device: str) -> tuple[RecentStep, LayerPages]:
    """Sequences that lack all, some, none and the first of their tokens."""
    arguments = case.arguments(device)
    missing = [
        MissingTokens(0, 4, range(10, 23), query=23),
        MissingTokens(2, 1, range(27, 90), query=90),
        MissingTokens(3, 5, range(12), query=12),
    ]
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    entries = torch.tensor([4, 2, 1, 5], dtype=torch.int32, device=device)
    step = RecentStep(entries, nothing, nothing, nothing, 4, missing)
    packed = LayerPages(
        case.pages.to(device),
        case.layout,
        arguments["block_tables"],
        case.k_scale,
        case.v_scale,
        on(case.options.get("transform"), device),
    )
    return step, packed


def rings(case: Case, ring: int, dtype: torch.dtype, device: str) -> Rings:
    layout = case.layout
    key, value = (
        torch.full((ENTRIES, layout.num_kv_heads, ring, size), 7.0, dtype=dtype, device=device)
        for size in (layout.head_size, layout.head_size_v)
    )
    return key, value


def assert_fills(fill: Any, case: Case, ring: int, window: int | None, device: str) -> None:
    """Like the reference, and nothing else is written."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    step, packed = step_and_pages(case, device)
    got, want = rings(case, ring, dtype, device), rings(case, ring, dtype, device)
    fill(step, got, packed, window)
    step.fill(want, packed, window)
    tolerance = 1e-5 if device == "cpu" else 2**-7
    assert (want[0] != 7).any()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a == 7, b == 7)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ring", "window"), [(64, None), (80, 20)])
def test_fill_in_the_interpreter(
    name: str, ring: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(**CASES[name], query_lens=(1,) * 4, seq_lens=LENGTHS)
    kernel = "halfbyte.attention.prefill.unpack"
    monkeypatch.setitem(sys.modules, kernel, interpreted(kernel))
    assert_fills(unpack_into_rings, case, ring, window, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_fill_on_a_gpu(name: str) -> None:
    case = make_case(**CASES[name], query_lens=(1,) * 4, seq_lens=LENGTHS)
    assert_fills(fill_rings, case, 64, None, "cuda")


@pytest.mark.gpu
def test_fill_does_not_sync() -> None:
    case = make_case(**CASES["recipe"], query_lens=(1,) * 4, seq_lens=LENGTHS)
    step, packed = step_and_pages(case, "cuda")
    compiled, filled = (rings(case, 64, torch.bfloat16, "cuda") for _ in range(2))
    fill_rings(step, compiled, packed)
    with waiting_is_an_error():
        fill_rings(step, filled, packed)
    assert all(torch.equal(a, b) for a, b in zip(filled, compiled, strict=True))
