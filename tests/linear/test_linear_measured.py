"""The choice by what was measured."""

from collections.abc import Iterator

import pytest
import torch

from halfbyte.linear import NvFp4LinearLayerConfig, measured, select_nvfp4_linear_kernel
from halfbyte.linear.measured import faster_backend

BOTH = ("cuda", "humming")


def config(n: int = 4000, k: int = 1000, m: int | None = 30) -> NvFp4LinearLayerConfig:
    return NvFp4LinearLayerConfig(
        n=n, k=k - k % 16, dtype=torch.bfloat16, m_hint=m, device_type="cuda", compute_capability=90
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cases = [
        {"n": 4096, "k": 1024, "m": 32, "microseconds": {"cuda": 12.0, "humming": 10.0}},
        {"n": 4096, "k": 1024, "m": 256, "microseconds": {"cuda": 10.5, "humming": 10.0}},
        {"n": 4096, "k": 4096, "m": 32, "microseconds": {"humming": 10.0}},
    ]
    monkeypatch.setattr(measured, "_table", lambda: {"90": cases})
    measured._nearest.cache_clear()
    yield
    measured._nearest.cache_clear()


@pytest.mark.usefixtures("table")
def test_the_nearest_case_decides() -> None:
    assert faster_backend(config(), "cuda", BOTH) == "humming"
    assert faster_backend(config(), "cuda", ("cuda", "triton")) == "cuda"
    assert faster_backend(config(m=200), "cuda", BOTH) == "cuda", "5 % are not worth a change"
    assert faster_backend(config(m=None), "cuda", BOTH) == "cuda"


@pytest.mark.usefixtures("table")
def test_nothing_is_known_far_from_what_was_measured() -> None:
    assert faster_backend(config(n=10_000), "cuda", BOTH) == "cuda"
    assert faster_backend(config(m=8), "cuda", BOTH) == "cuda"
    assert faster_backend(config(k=4096), "cuda", BOTH) == "cuda", "the default was not measured"


def test_committed_table_prefers_ours() -> None:
    chosen = {
        (case["n"], case["k"], case["m"])
        for case in measured._table()["90"]
        if faster_backend(config(case["n"], case["k"], case["m"]), "cuda", case["microseconds"])
        != "cuda"
    }
    assert chosen == set()


def test_hint_changes_nothing_where_one_backend_is_left() -> None:
    for m in (None, 1, 32):
        kernel = select_nvfp4_linear_kernel(config(4096, 14336, m))
        assert kernel.name in BOTH
    cpu = NvFp4LinearLayerConfig(n=64, k=64, dtype=torch.float32, m_hint=32)
    assert select_nvfp4_linear_kernel(cpu).name in ("cpu", "reference")
