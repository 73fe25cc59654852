"""Selection of attention backends, and its log messages and errors."""

import logging
from typing import Any

import pytest
import torch

from attention.cases import config, make_case
from halfbyte.attention import (
    ATTENTION_BACKENDS,
    AttentionConfig,
    AttentionPlans,
    cpu,
    paged_attention,
    registry,
)
from halfbyte.attention.paged import plan
from halfbyte.attention.prefill import key_ranges
from halfbyte.dispatch import NoImplementationError
from halfbyte.kvcache import STORE_BACKENDS
from halfbyte.kvcache.store import cpu as cpu_store
from halfbyte.kvcache.store import triton as triton_store
from halfbyte.kvcache.store.base import StoreConfig
from halfbyte.layouts import KVCacheDType, PageLayout


@pytest.mark.parametrize("capability", [0, 80, 90, 100])
def test_explanation_of_batch_invariant_calls(
    capability: int,
) -> None:
    case = make_case()
    config = AttentionConfig(
        layout=case.layout,
        num_heads=8,
        query_dtype=torch.bfloat16,
        device_type="cuda" if capability else "cpu",
        num_tokens=2,
        num_seqs=2,
        batch_invariant=True,
        compute_capability=capability,
    )
    chosen = ATTENTION_BACKENDS.select(config, compute_capability=capability)
    verdicts = ATTENTION_BACKENDS.explain(config, capability)
    assert chosen.name == next(verdict.name for verdict in verdicts if verdict.usable)
    assert chosen.name == ("triton" if capability else "cpu")
    if capability:
        assert ("cuda", False) in [(verdict.name, verdict.usable) for verdict in verdicts]
        asked = ATTENTION_BACKENDS.select(config, "cuda", capability)
        assert asked.name == "cuda"


def test_calls_that_share_plans_choose_a_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple] = []
    select = ATTENTION_BACKENDS.select

    def counted(config: AttentionConfig, **how: Any) -> Any:
        chosen.append((config.softcap, how["explicit"]))
        return select(config, **how)

    monkeypatch.setattr(ATTENTION_BACKENDS, "select", counted)
    case, plans = make_case(query_dtype=torch.float32), AttentionPlans()

    def attend(**options: Any) -> torch.Tensor:
        return paged_attention(case.query, case.pages, **case.arguments() | options, plans=plans)

    once = attend()
    assert torch.equal(attend(), once)
    assert chosen == [(None, None)]
    # Other configs and explicit names have their own cached choices.
    attend(softcap=2.0)
    attend(backend="reference")
    assert chosen[1:] == [(2.0, None), (None, "reference")]
    with pytest.raises(NoImplementationError, match="unknown 'nobody'"):
        attend(backend="nobody")


def test_the_reference_on_a_gpu_says_why_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    odd = config(layout=PageLayout("bfloat16", "bfloat16", 40, None, 8, 16))
    registry._log_slow.cache_clear()
    for _ in range(2):
        chosen = ATTENTION_BACKENDS.select(odd, compute_capability=90)
        assert chosen.name == "reference"
    assert ATTENTION_BACKENDS.select(odd, "reference", compute_capability=90) is chosen
    ATTENTION_BACKENDS.select(config(), compute_capability=90)
    (message,) = (record.message for record in caplog.records if record.name == "halfbyte")
    assert message.startswith("attention: the reference runs, slowly")
    assert "40" in message


def test_the_reference_on_a_cpu_says_why_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: number for name, number in cpu.FORMATS.items() if name != "mxfp4"}
    monkeypatch.setattr(cpu, "FORMATS", known)
    odd = config(layout=PageLayout("mxfp4", "bfloat16", 64, None, 8, 16), device_type="cpu")
    registry._log_slow.cache_clear()
    with caplog.at_level(logging.INFO, "halfbyte"):
        assert ATTENTION_BACKENDS.select(odd, "reference").name == "reference"
        usual = config(layout=PageLayout("nvfp4", "nvfp4", 64, None, 8, 16), device_type="cpu")
        assert ATTENTION_BACKENDS.select(usual).name == "cpu"
        assert not caplog.messages
        for _ in range(2):
            assert ATTENTION_BACKENDS.select(odd).name == "reference"
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.message.startswith("attention runs by PyTorch operators: ")
    assert "mxfp4" in record.message


@pytest.mark.parametrize("side", ["k_dtype", "v_dtype"])
def test_kernels_leave_unknown_formats_to_the_reference(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a new format: here a known format is removed from their lists."""
    known = [dtype for dtype in KVCacheDType if dtype not in ("auto", "mxfp4")]
    for module in (cpu, key_ranges, plan, cpu_store, triton_store):
        monkeypatch.setattr(module, "FORMATS", known)
    names = {"k_dtype": "nvfp4", "v_dtype": "nvfp4", side: "mxfp4"}
    layout = PageLayout(names["k_dtype"], names["v_dtype"], 64, None, 8, 16)
    known_layout = PageLayout("nvfp4", "nvfp4", 64, None, 8, 16)
    for name, capability, tokens in (("cpu", 0, 2), ("triton", 90, 2), ("dense", 90, 512)):
        device = "cuda" if capability else "cpu"
        work = {"device_type": device, "num_tokens": tokens, "num_seqs": 2}
        backend = ATTENTION_BACKENDS.get(name)
        assert backend.can_implement(config(layout=known_layout, **work))[0]
        assert backend.can_implement(config(layout=layout, **work)) == (
            False,
            f"does not know the format of {side[0].upper()}, mxfp4",
        )
        if name in ("cpu", "triton"):
            stores = STORE_BACKENDS.get(name)
            dtypes = torch.bfloat16, torch.bfloat16
            assert stores.can_implement(StoreConfig(known_layout, *dtypes, device))[0]
            assert not stores.can_implement(StoreConfig(layout, *dtypes, device))[0]


def test_attention_backends_explicit_unknown_lists_valid() -> None:
    with pytest.raises(NoImplementationError, match="reference"):
        ATTENTION_BACKENDS.get("flash")
