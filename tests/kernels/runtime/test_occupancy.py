"""Kernels whose launches overlap take no more CTAs per SM than their grids have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.attention.decode import cuda as decode
from halfbyte.attention.decode.recipe import NO_RECIPE
from halfbyte.attention.decode.variant import choose_variant
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES, bytes_for_ctas
from halfbyte.layouts import PageLayout
from halfbyte.linear.w4a16.gemv import launcher as gemv
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe.cuda.gemm_sm90 import launcher as moe_gemm
from halfbyte.moe.cuda.gemm_sm90.plan import make_plan
from halfbyte.moe.cuda.plan import Work

SM_BYTES = 228 * 1024
H200 = Gpu(90, SM_BYTES - RESERVED_BYTES, 132, 66)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An H200's limits; shared memory by name of the functions that are loaded."""
    found: dict[str, int] = {}

    def load(name: str, macros: Any, functions: Any, device: int) -> dict[str, nvrtc.Kernel]:
        found.update(functions)
        return {function: nvrtc.Kernel(0, size, device) for function, size in functions}

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(9, SM_BYTES))
    monkeypatch.setattr(nvrtc, "load", load)
    return found


def properties(major: int, sm_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(major=major, shared_memory_per_multiprocessor=sm_bytes)


def ctas_that_fit(shared_bytes: int, sm_bytes: int = SM_BYTES) -> int:
    return sm_bytes // (shared_bytes + RESERVED_BYTES)


@pytest.mark.parametrize("sm_bytes", [SM_BYTES, 100 * 1024])
@pytest.mark.parametrize("ctas", range(1, 9))
def test_exactly_as_many_ctas_fit(
    ctas: int, sm_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(9, sm_bytes))
    most = sm_bytes // ctas - RESERVED_BYTES
    for used in (0, 1000, most // 2, most):
        taken = bytes_for_ctas(used, ctas, 0)
        assert taken >= used
        assert ctas_that_fit(taken, sm_bytes) == ctas


def test_nothing_is_added_where_launches_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(8, 164 * 1024))
    assert bytes_for_ctas(5000, 2, 0) == 5000


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_decode(head_size: int, group: int, loaded: dict[str, int]) -> None:
    """Of head size 64, three CTAs would fit instead of two."""
    layout = PageLayout("nvfp4", "nvfp4", head_size, None, 8, 16)
    variant = choose_variant(layout, group, 1.0, False, 90)
    assert variant is not None
    decode._kernels.__wrapped__(layout, group, torch.bfloat16, False, variant, NO_RECIPE, 0)
    assert ctas_that_fit(loaded["decode"]) == variant.ctas
    if head_size == 64 and group <= 8:
        assert ctas_that_fit(variant.cta_bytes(layout)) > variant.ctas


@pytest.mark.parametrize("m", [1, 8, 16])
def test_gemv(m: int, loaded: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token's x is small: more CTAs would fit."""
    monkeypatch.setattr(gemv, "gpu_of", lambda _: H200)
    monkeypatch.setattr(
        gemv, "_gemv_kernels", lambda *_: gemv._GemvKernels(*[nvrtc.Kernel(0, 0, 0)] * 2)
    )
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        product = gemv.GemvProduct(torch.Size((m, k)), n, torch.bfloat16, 0, False, None)
        assert ctas_that_fit(product._kernel.shared_bytes) == product._plan.ctas
        if m == 1:
            assert ctas_that_fit(product._plan.shared_bytes(n, k, m)) > product._plan.ctas


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_experts(tokens: int, loaded: dict[str, int]) -> None:
    work = Work(1536, 2048, 128, "nvfp4", gated=True)
    plan = make_plan(work, tokens, H200.block_bytes)
    assert plan is not None
    moe_gemm._gemm_kernel.__wrapped__(torch.bfloat16, plan, work, 0)
    assert ctas_that_fit(loaded["moe_gemm"]) == plan.ctas
