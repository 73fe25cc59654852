"""The prefill kernel for SM90: its CUDA source run on the CPU, and its machine code."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, make_case
from attention.prefill.dense_cases import SMALL, inputs_of, make_small
from cuda_on_host import needs_compiler
from cuda_on_host.build import overlapping_kernels
from halfbyte.attention import AttentionInputs, AttentionPlans, router
from halfbyte.attention.base import Part
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.dense import DenseAttention
from halfbyte.attention.prefill.sm90 import launcher
from machine_code import compiled, disassembled, stack_bytes
from slow import slow
from triton_interpreter import interpreted

RECENT: dict[str, dict[str, Any]] = {
    # Around multiples of 16, R and a step's 128 keys; prompts shorter than R.
    "lengths": {
        "query_lens": (63, 64, 65, 15, 17, 129, 9),
        "seq_lens": (63, 64, 65, 15, 17, 129, 9),
    },
    "prefixes": {"query_lens": (20, 33, 64, 130), "seq_lens": (147, 148, 400, 257)},
    "with-decoding-sequences": {
        "query_lens": (1, 40, 3, 12, 0, 30),
        "seq_lens": (50, 140, 3, 300, 9, 30),
    },
    "shorter-than-their-queries": {"query_lens": (30, 33, 20, 40), "seq_lens": (10, 133, 0, 25)},
    "recent-16": {"recent": 16, "query_lens": (40, 33), "seq_lens": (40, 200)},
    "recent-200": {"recent": 200, "query_lens": (40, 150), "seq_lens": (400, 150)},
    "group-1": {"group": 1, "query_lens": (150, 40), "seq_lens": (150, 100)},
    "group-7": {"group": 7, "kv_heads": 1, "query_lens": (40,), "seq_lens": (150,)},
    "group-200": {"group": 200, "kv_heads": 1, "query_lens": (12,), "seq_lens": (70,)},
    "head-size-128": {"head_size": 128, "query_lens": (70, 30), "seq_lens": (290, 30)},
    "float16": {"query_dtype": torch.float16, "query_lens": (40, 33), "seq_lens": (40, 200)},
    "recipe": {"transform": {}, "query_lens": (40, 33, 20), "seq_lens": (40, 200, 90)},
}


@pytest.fixture(autouse=True)
def sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of two multiprocessors."""
    monkeypatch.setattr(launcher, "compute_capability_of", lambda device: 90)
    monkeypatch.setattr(launcher, "missing_module", lambda module, source: "")
    monkeypatch.setattr(launcher, "num_sms", lambda device: 2)
    monkeypatch.setattr(dense_plan, "MIN_SM90_TILES", 1)
    monkeypatch.setattr(launcher, "_kernel", launcher._kernel.__wrapped__)
    with overlapping_kernels(90):
        yield


def run(case: Case, **changes: Any) -> tuple[AttentionInputs, torch.Tensor]:
    """Inputs with output, and log-denominators."""
    lse = torch.full(case.query.shape[:2], torch.nan)
    inputs = replace(inputs_of(case, "cpu", lse), **changes)
    inputs.set_output(torch.full_like(inputs.query, torch.nan))
    assert inputs.recent is None or DenseAttention.attends_to_recent(inputs)
    router.run_on(DenseAttention, inputs)
    return inputs, lse


def assert_right(case: Case) -> None:
    inputs, lse = run(case)
    assert_close_to_exact(inputs.out, case)
    allowed = 3e-2 if "transform" not in case.options else 0.1
    torch.testing.assert_close(lse.double(), case.expected()[1], rtol=1e-3, atol=allowed)


@needs_compiler
@pytest.mark.parametrize("name", RECENT)
def test_last_tokens_and_pages_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"recent": 64, "sinks": True, "kv_heads": 2, **RECENT[name]}
    assert_right(make_small(options, monkeypatch, workspace_tokens=1000))


@needs_compiler
@pytest.mark.parametrize(
    "name", ["prefixes", "with-decoding-sequences", "shorter-than-their-queries", slow("recipe")]
)
def test_pages_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's attention takes none of the prompts."""
    case = make_small(SMALL[name], monkeypatch, workspace_tokens=1000)
    assert not dense_plan.make_plan(inputs_of(case, "cpu"), 16, True).long
    assert_right(case)


@needs_compiler
def test_prompts_beyond_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's attention takes blocks of their keys; last tokens are merged."""
    lengths = {"query_lens": (40, 33), "seq_lens": (40, 200)}
    case = make_small({"recent": 20, "sinks": True, **lengths}, monkeypatch, workspace_tokens=100)
    inputs = inputs_of(case, "cpu")
    (part,) = dense_plan.make_plan(inputs, 64, True).split_off
    assert part.part is Part.MERGED
    assert part.seq_lens.tolist() == [200]
    merged = part.inputs_of(inputs)
    assert not DenseAttention.attends_to_recent(merged)
    # On a GPU `dense` is selected for them; here it is given.
    monkeypatch.setattr(router, "_select", lambda *_: DenseAttention)
    name = "halfbyte.attention.recent.launcher"
    monkeypatch.setitem(sys.modules, name, interpreted(name))
    assert_right(case)


@needs_compiler
def test_layers_of_several_groups_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's tiles have as many tokens of 27 and of 32 query heads, this kernel's do not."""
    plans = AttentionPlans()
    for group in (27, 32):
        options = {"group": group, "query_lens": (40,), "seq_lens": (90,), "recent": 20}
        case = make_small(options, monkeypatch, workspace_tokens=1000)
        inputs, _ = run(case, plans=plans)
        assert_close_to_exact(inputs.out, case)


@needs_compiler
def test_entries_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"query_lens": (20, 30), "seq_lens": (90, 100), "recent": 20}
    case = make_small(options, monkeypatch, workspace_tokens=1000)
    recent = inputs_of(case, "cpu").recent
    assert recent is not None
    entries = torch.stack([recent.entries, torch.full_like(recent.entries, 99)], dim=1)[:, 0]
    inputs, _ = run(case, recent=recent._replace(entries=entries))
    assert_close_to_exact(inputs.out, case)


def test_few_tiles_are_divided_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_small({"query_lens": (40, 60), "seq_lens": (40, 60)}, monkeypatch)
    inputs = inputs_of(case, "cpu")
    # Two KV heads; a tile has 96 tokens.
    for least, on_sm90 in ((4, True), (5, False)):
        monkeypatch.setattr(dense_plan, "MIN_SM90_TILES", least)
        plan = dense_plan.make_plan(inputs, 16, True)
        assert plan.on_sm90 == on_sm90
        assert bool(plan.chunks) == on_sm90  # else PyTorch's attention
        assert bool(plan.long) != on_sm90
    case = make_small({"query_lens": (40,), "seq_lens": (40,), "recent": 20}, monkeypatch)
    assert dense_plan.make_plan(inputs_of(case, "cpu"), 16, True).on_sm90


@needs_compiler
def test_scales_that_are_not_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"query_lens": (40,), "seq_lens": (90,), "recent": 20}
    case = make_small(options, monkeypatch, workspace_tokens=1000)
    query, scale = case.query, inputs_of(case, "cpu").scale
    pairs: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {"query": -query, "scale": -scale}),
        ({"query": torch.zeros_like(query)}, {"scale": 0.0}),
    )
    for first, second in pairs:
        (a, a_lse), (b, b_lse) = run(case, **first), run(case, **second)
        assert torch.equal(a.out, b.out)
        assert torch.equal(a_lse, b_lse)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 100},
        {"softcap": 5.0},
        {"query": torch.zeros(1, 8, 64)},
    ],
    ids=["window", "softcap", "float32"],
)
def test_what_is_not_supported(changes: dict[str, Any]) -> None:
    inputs = inputs_of(make_case(query_lens=(1,), seq_lens=(1,)), "cpu")
    assert launcher.supports(inputs)
    assert not launcher.supports(replace(inputs, **changes))


@pytest.mark.parametrize("recent", [0, 64])
@pytest.mark.parametrize(("head_size", "group"), [(64, 8), (128, 4), slow(128, 7), slow(64, 1)])
def test_machine_code(head_size: int, group: int, recent: int, tmp_path: Path) -> None:
    """No spilled registers; and the compiler sees when matmuls end: it adds no waits for them."""
    macros = {"X_BF16": 1, "HEAD_SIZE": head_size, "GROUP": group, "RECENT": recent}
    cubin = compiled("attention/prefill/sm90/prefill.cu", dict(macros), "sm_90a")
    assert stack_bytes(cubin) <= 8
    code = disassembled(cubin, tmp_path)
    assert code.count("WARPGROUP.DEPBAR") == 5
