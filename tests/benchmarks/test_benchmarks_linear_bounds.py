"""Ratios and bounds of a canned run, and its table."""

from typing import Any

import pytest

from benchmarks.bounds.linear import of_linear
from benchmarks.linear_layers.bounds import bounds
from benchmarks.linear_layers.ratios import judged_by, ratios
from benchmarks.linear_layers.table import linear_markdown_table

BACKENDS = ("cuda", "humming", "triton", "reference")
GOOD = {"cuda": 10.0, "humming": 15.0, "triton": 30.0, "dense_bf16": 40.0, "plain_read": 8.0}
"""µs of one case in which all bounds hold."""


def row(m: int = 1, n: int = 4096, k: int = 14336, **changes: float | None) -> dict[str, Any]:
    """A row of a report; `changes` replaces times, or removes them (None).

    In a row, and in a graph, everything takes half as long, so that the ratios are the same;
    `back_to_back_cuda` and `in_graph_cuda` change our kernel's alone.
    """
    in_a_row, in_graph = changes.pop("back_to_back_cuda", None), changes.pop("in_graph_cuda", None)
    times = {name: time for name, time in {**GOOD, **changes}.items() if time is not None}
    contenders: dict[str, dict[str, Any]] = {
        name: {"single": time, "back_to_back": time / 2, "in_graph": time / 2}
        for name, time in times.items()
    }
    contenders["reference"] = {"failed": "RuntimeError: too large"}
    if in_a_row is not None:
        contenders["cuda"]["back_to_back"] = in_a_row
    if in_graph is not None:
        contenders["cuda"]["in_graph"] = in_graph
    case: dict[str, Any] = {"shape": f"{n}x{k}", "n": n, "k": k, "m": m, "contenders": contenders}
    case |= {"selected": "cuda", "selected_without_hint": "triton"}
    return {**case, **ratios(case, BACKENDS)}


def report(*rows: dict[str, Any], gpu: str | None = "H200") -> dict[str, Any]:
    return {"gpu": gpu, "microseconds": list(rows), "judged_by": judged_by(gpu is not None)}


def verdicts(*rows: dict[str, Any]) -> dict[tuple[str, str], bool | None]:
    return {(bound["name"], bound["rows"]): bound["holds"] for bound in bounds(report(*rows))}


def test_ratios_compare_the_choice_and_our_kernel() -> None:
    assert row()["single"] == {
        "fastest": "cuda",
        "selected_over_fastest": 1.0,
        "selected_without_hint_over_fastest": 3.0,
        "selected_over_dense": 0.25,
        "ours_over_humming": 0.6667,
        "ours_over_dense": 0.25,
        "ours_of_read": 0.8,
    }
    assert row(humming=None)["single"]["ours_over_humming"] is None
    # Dense weights and a plain read are no backends.
    assert row(cuda=20.0)["single"]["fastest"] == "humming"
    assert row(cuda=20.0)["single"]["selected_over_fastest"] == pytest.approx(1.3333)
    # Without CUDA C++, Triton is our kernel; the choice was not measured then.
    other = row(cuda=None)["back_to_back"]
    assert other["ours_over_humming"] == 2.0
    assert other["selected_over_fastest"] is None


def test_all_hold_where_they_should() -> None:
    assert verdicts(row(1), row(16), row(256), row(4096)) == {
        ("ours_over_humming", "M 1 to 16"): True,
        ("ours_of_read", "M 1 to 16"): True,
        ("selected_over_dense", "M 256 to 4095"): True,
        ("selected_over_dense", "M >= 4096"): True,
        ("selected_over_fastest", "every M"): True,
    }


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        (row(16, humming=13.0), ("ours_over_humming", "M 1 to 16")),
        (row(16, plain_read=6.9), ("ours_of_read", "M 1 to 16")),
        (row(256, dense_bf16=8.9), ("selected_over_dense", "M 256 to 4095")),
        (row(4096, dense_bf16=9.5), ("selected_over_dense", "M >= 4096")),
        (row(64, triton=9.0), ("selected_over_fastest", "every M")),
        (row(4, in_graph_cuda=5.65), ("ours_over_humming", "M 1 to 16")),
    ],
    ids=["humming", "read", "dense", "dense-many", "fastest", "in a graph alone"],
)
def test_one_case_breaks_a_bound(changed: dict[str, Any], broken: tuple[str, str]) -> None:
    found = verdicts(row(1), changed, row(1024), row(8192))
    assert found[broken] is False
    assert [name for name, holds in found.items() if not holds] == [broken]


def test_on_a_gpu_the_time_in_a_graph_decides() -> None:
    slow_to_start = row(4, back_to_back_cuda=5.65)
    assert all(verdicts(slow_to_start).values())
    (bound, *_) = bounds(report(slow_to_start))
    assert bound["back_to_back"] == {"worst": 0.7533, "m": 4}
    assert bound["in_graph"] == {"worst": 0.6667, "m": 4}
    (on_cpu,) = bounds(report(row(4, triton=9.0, back_to_back_cuda=5.65), gpu=None))
    assert on_cpu["holds"] is False


@pytest.mark.parametrize(
    ("m", "times"),
    [
        (17, {"humming": 10.0, "plain_read": 2.0, "dense_bf16": 1.0}),
        (255, {"dense_bf16": 1.0}),
        (2048, {"dense_bf16": 9.0}),
        (4096, {"dense_bf16": 9.6}),
    ],
)
def test_bounds_are_for_some_rows_of_x(m: int, times: dict[str, Any]) -> None:
    assert all(verdicts(row(m, **times)).values())


def test_the_limit_depends_on_the_shape() -> None:
    (wide,) = (b for b in bounds(report(row(humming=12.5))) if b["name"] == "ours_over_humming")
    assert wide["holds"] is False
    assert wide["limit"] == 0.75
    assert wide["meaning"] == "our kernel / Humming <= 0.75"
    assert wide["single"] == wide["back_to_back"] == {"worst": 0.8, "m": 1}
    small = bounds(report(row(n=6144, k=4096, humming=12.5)))
    assert all(bound["holds"] for bound in small)
    other = bounds(report(row(n=64, k=64, humming=1.0)))
    assert "ours_over_humming" not in {bound["name"] for bound in other}


def test_unmeasured_claims_are_not_reported_to_hold() -> None:
    found = verdicts(row(1), row(2, humming=None))
    assert found["ours_over_humming", "M 1 to 16"] is None
    assert found["ours_of_read", "M 1 to 16"] is True
    found = verdicts(row(1, humming=12.0), row(2, humming=None))
    assert found["ours_over_humming", "M 1 to 16"] is False
    (bound, *_) = bounds(report(row(humming=None)))
    assert bound["single"] == {"worst": None, "m": None}


def test_who_cannot_be_captured_might_be_the_fastest() -> None:
    """A peer that syncs with the host has no graph time."""
    case = row(16)
    del case["contenders"]["humming"]["in_graph"]
    case |= ratios(case, BACKENDS)
    assert case["in_graph"]["fastest"] is case["in_graph"]["selected_over_fastest"] is None
    assert case["back_to_back"]["fastest"] == "cuda"
    found = verdicts(row(1), case)
    assert found["selected_over_fastest", "every M"] is None
    assert found["ours_over_humming", "M 1 to 16"] is None


def test_on_a_cpu_only_the_choice_is_judged() -> None:
    found = bounds(report(row(), gpu=None))
    assert [bound["name"] for bound in found] == ["selected_over_fastest"]


def test_markdown_table_of_a_run() -> None:
    lines = linear_markdown_table(report(row(1), row(2), row(256, humming=None, cuda=1234.5)))
    assert lines.splitlines()[2:] == [
        "| 4,096 x 14,336 | 1 | 5.0 µs | 7.5 µs | 20.0 µs | 0.67 | 0.25 | 80% |",
        "| 4,096 x 14,336 | 256 | 617 µs |  | 20.0 µs |  | 30.86 | 1% |",
    ]


def test_markdown_table_marks_a_peer_that_was_inexact() -> None:
    case = row(16)
    case["contenders"]["humming"]["inexact"] = True
    assert "| 5.0 µs | 7.5 µs* | 20.0 µs |" in linear_markdown_table(report(case))


def test_bounds_for_the_check_say_the_same() -> None:
    found = list(of_linear(report(row(1), row(256, dense_bf16=8.9))))
    assert [bound.holds for bound in found] == [
        b["holds"] for b in bounds(report(row(1), row(256, dense_bf16=8.9)))
    ]
    (missed,) = (bound for bound in found if not bound.holds)
    assert missed.name == "4096x14336, M 256 to 4095: selected / dense bf16"
    assert (missed.value, missed.comparison, missed.limit) == (1.1236, "<=", 1.12)
    (first, *_) = of_linear(report(row(1), row(2, humming=None)))
    assert not first.holds, "what was not measured does not hold"
