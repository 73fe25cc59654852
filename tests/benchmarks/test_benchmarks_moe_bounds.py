"""Ratios and bounds of a canned run of experts, and its table."""

import math
from typing import Any

import pytest

from benchmarks import check
from benchmarks.bounds.moe import of_moe
from benchmarks.moe_layers.ratios import moe_ratios
from benchmarks.moe_layers.table import moe_markdown_table, moe_tables

QWEN, GPT_OSS = "128x8x2048x768", "32x4x2880x2880-mxfp4"
MEGABYTES = {
    QWEN: {1: 21, 4: 77, 16: 220, 64: 335, 256: 340, 1024: 340, 8192: 340},
    GPT_OSS: {1: 53, 4: 180, 16: 380, 64: 423, 256: 423, 1024: 423, 8192: 423},
}
GOOD = {
    "cuda": 60.0,
    "triton": 90.0,
    "vllm_marlin": 100.0,
    "vllm_bf16": 120.0,
    "humming": 110.0,
    "dense_bf16": 50.0,
    "plain_read": 48.0,
}
"""µs of a case, of which all times are multiples, so that all bounds hold."""
RATE = 4.0
"""TB/s: 60 µs are 70 % of it for 168 MB."""


def case(shape: str, m: int, **changes: float | None) -> dict[str, Any]:
    """A case whose bytes take `GOOD`'s times; `changes` are factors, or None for no measurement."""
    num_bytes = MEGABYTES[shape][m] * 1_000_000
    factors = {name: changes.get(name, 1.0) for name in GOOD}
    times = {
        name: GOOD[name] * num_bytes / 168e6 * factor
        for name, factor in factors.items()
        if factor is not None
    }
    contenders: dict[str, Any] = {
        name: {"single": time + 3, "back_to_back": time + 2, "in_graph": time}
        for name, time in times.items()
    }
    contenders["triton_kernels"] = {"failed": "RuntimeError: not for this"}
    row = {
        "name": f"{shape} M={m}",
        "shape": shape,
        "m": m,
        "bytes_hit": num_bytes,
        "contenders": contenders,
        "selected": "cuda",
    }
    return {**row, **moe_ratios(row, RATE)}


def report(**changed: dict[str, Any]) -> dict[str, Any]:
    """All cases; `changed` gives the changes of one, named by shape and M (`qwen_16`)."""
    names = {QWEN: "qwen", GPT_OSS: "gpt"}
    rows = [
        case(shape, m, **changed.get(f"{names[shape]}_{m}", {}))
        for shape, tokens in MEGABYTES.items()
        for m in tokens
    ]
    skipped = {QWEN: {"triton_kernels": "takes MXFP4, not nvfp4"}, GPT_OSS: {}}
    return {"microseconds": rows, "judged_by": ["in_graph"], "skipped": skipped}


def broken(**changed: dict[str, Any]) -> set[str]:
    return {bound.name for bound in check.broken(of_moe(report(**changed)))}


def test_ratios_compare_our_kernel() -> None:
    row = case(QWEN, 16)
    assert row["in_graph"] == {
        "ours_of_read_rate": 0.7,
        "ours_over_read": 1.25,
        "fastest_peer": "vllm_marlin",
        "ours_over_fastest_peer": 0.6,
        "ours_over_marlin": 0.6,
        "ours_over_bf16": 0.5,
    }
    assert row["single"]["ours_over_read"] < 1.25
    # PyTorch's product and our other kernel are no peers.
    assert case(QWEN, 16, dense_bf16=0.1, triton=0.1)["in_graph"]["fastest_peer"] == "vllm_marlin"
    assert case(QWEN, 16, humming=0.5)["in_graph"]["fastest_peer"] == "humming"
    # Without CUDA C++, Triton is our kernel.
    assert case(QWEN, 16, cuda=None)["in_graph"]["ours_over_marlin"] == 0.9


@pytest.mark.parametrize("needed", ["vllm_marlin", "vllm_bf16"])
def test_without_a_needed_peer_none_is_the_fastest(needed: str) -> None:
    found = case(QWEN, 16, **{needed: None})["in_graph"]
    assert found["fastest_peer"] is found["ours_over_fastest_peer"] is None
    assert case(QWEN, 16, humming=None)["in_graph"]["fastest_peer"] == "vllm_marlin"


def test_who_cannot_be_captured_might_be_the_fastest() -> None:
    row = case(QWEN, 16)
    del row["contenders"]["humming"]["in_graph"]
    found = moe_ratios(row, RATE)
    assert found["in_graph"]["fastest_peer"] is None
    assert found["back_to_back"]["fastest_peer"] == "vllm_marlin"


def test_all_bounds_hold_where_they_should() -> None:
    bounds = list(of_moe(report()))
    assert [bound for bound in bounds if not bound.holds] == []
    assert [(bound.name, round(bound.value, 4), bound.limit) for bound in bounds] == [
        (f"{QWEN}: cases", 7, 7),
        (f"{QWEN}, M <= 16, from 50 MB: of the read rate", 0.7, 0.65),
        (f"{QWEN}, M <= 16, below 50 MB: of a plain read", 1.25, 1.5),
        (f"{QWEN}, M <= 16: of the fastest peer", 0.6, 0.7),
        (f"{QWEN}, M >= 1024: of vLLM bf16", 0.5, 1.05),
        (f"{QWEN}, every M: of the fastest peer", 0.6, 1.05),
        (f"{GPT_OSS}: cases", 7, 7),
        (f"{GPT_OSS}, M <= 16, from 50 MB: of the read rate", 0.7, 0.65),
        (f"{GPT_OSS}, M <= 16: of the fastest peer", 0.6, 0.7),
        (f"{GPT_OSS}, M >= 1024: of vLLM bf16", 0.5, 1.05),
        (f"{GPT_OSS}, every M: of the fastest peer", 0.6, 1.05),
    ]


@pytest.mark.parametrize(
    ("where", "changes", "missed"),
    [
        ("qwen_4", {"cuda": 1.08}, "M <= 16, from 50 MB: of the read rate"),
        ("qwen_1", {"plain_read": 0.8}, "M <= 16, below 50 MB: of a plain read"),
        ("qwen_16", {"humming": 0.75}, "M <= 16: of the fastest peer"),
        ("qwen_8192", {"vllm_bf16": 0.47}, "M >= 1024: of vLLM bf16"),
        ("qwen_64", {"vllm_marlin": 0.56}, "every M: of the fastest peer"),
    ],
)
def test_one_case_breaks_a_bound(where: str, changes: dict[str, float], missed: str) -> None:
    # A faster bf16 at many tokens is the fastest peer, too.
    also = {f"{QWEN}, every M: of the fastest peer"} if where == "qwen_8192" else set()
    assert broken(**{where: changes}) == {f"{QWEN}, {missed}"} | also


def test_bounds_end_at_their_tokens() -> None:
    assert not broken(qwen_64={"cuda": 1.5}, qwen_256={"vllm_bf16": 0.55}, gpt_1={"plain_read": 2})


def test_what_was_not_measured_does_not_hold() -> None:
    names = {"M <= 16: of the fastest peer", "every M: of the fastest peer"}
    assert broken(gpt_1={"vllm_marlin": None}) == {f"{GPT_OSS}, {name}" for name in names}
    assert len(broken(gpt_1={"cuda": None, "triton": None})) == 3
    short = report()
    del short["microseconds"][3]
    bounds = {bound.name: bound for bound in of_moe(short)}
    assert check.broken(bounds.values()) == [bounds[f"{QWEN}: cases"]]
    del short["microseconds"][6:]
    assert f"{GPT_OSS}: cases" in {bound.name for bound in check.broken(of_moe(short))}
    (value,) = (
        b.value
        for b in of_moe(report(gpt_1={"plain_read": None, "cuda": None, "triton": None}))
        if b.name.endswith("of the read rate") and b.name.startswith(GPT_OSS)
    )
    assert math.isnan(value)


def test_markdown_table_of_a_run() -> None:
    rows = moe_markdown_table(report(gpt_64={"humming": None})).splitlines()
    assert rows[0] == (
        "| experts | tokens (M) | MB hit | halfbyte | vLLM Marlin | vLLM bf16 | Humming "
        "| plain read | of the read rate | halfbyte / fastest peer |"
    )
    assert len(rows) == 2 + 14
    assert rows[2] == (
        "| qwen3-30b-a3b | 1 | 21 | 7.5 µs | 12.5 µs | 15.0 µs | 13.8 µs | 6.0 µs | 70% | 0.60 |"
    )
    assert rows[12] == (
        "| gpt-oss-20b | 64 | 423 | 151 µs | 252 µs | 302 µs |  | 121 µs | 70% | 0.60 |"
    )


def test_tables_on_the_terminal() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        for each in moe_tables(report()):
            console.print(each)
    printed = captured.get()
    assert "…" not in printed
    for part in (QWEN, GPT_OSS, "M 8192", "failed", "triton_kernels: takes MXFP4, not nvfp4"):
        assert part in printed
