"""The committed runs meet their bounds, and changed runs do not."""

import math
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from benchmarks import check
from benchmarks.bounds import attention, recipes, vllm
from benchmarks.bounds.base import Bound, result

COMMITTED = check.committed()


def _param(bound: Bound) -> Any:
    known = pytest.mark.xfail(strict=True, reason=bound.known_miss)
    marks = (known,) if bound.known_miss else ()
    return pytest.param(bound, id=f"{bound.run}: {bound.name}", marks=marks)


@pytest.mark.parametrize("bound", [_param(bound) for bound in COMMITTED])
def test_committed_run_keeps_its_bound(bound: Bound) -> None:
    assert bound.holds, bound


def test_every_bound_is_there() -> None:
    """The number of bounds of each run, and the known misses: none was dropped."""
    assert Counter(bound.run for bound in COMMITTED) == {
        "attention_decode": 37,
        "attention_cpu": 2,
        "attention_cpu_busy_xeon": 2,
        "attention_cpu_zen4": 2,
        "decode_step": 2,
        "engine_step": 6,
        "linear": 15,
        "moe": 11,
        "kv_recipes": 20,
        "recipe_speed": 9,
        "recipe_speed_cpu": 2,
        "vllm_step": 8,
        "vllm_step_qwen3_30b_a3b": 1,
        "vllm_step_qwen3_30b_a3b_in_place": 4,
        "vllm_step_gpt_oss_20b": 4,
        "vllm_step_tp2": 1,
    }
    assert {bound.name for bound in COMMITTED if bound.known_miss} == {
        "gemma-3-270m, accurate: KL, of fp8's, end to start",
        "store 64: accurate, us",
        "128x2048, ms",
        "balanced, 1x2048 greedy, ms",
        "128x8x2048x768, M <= 16, below 50 MB: of a plain read",
        "32x4x2880x2880-mxfp4, M <= 16, from 50 MB: of the read rate",
    }


@pytest.mark.parametrize(
    ("value", "comparison", "limit", "expected"),
    [
        (1.0, "<=", 1.0, True),
        (1.0, "<", 1.0, False),
        (0.9, ">=", 1.0, False),
        (1.0, ">", 1.0, False),
        (2.0, "==", 1.0, False),
        (math.nan, "<=", 1.0, False),
        (math.nan, ">=", 1.0, False),
    ],
)
def test_comparisons(value: float, comparison: str, limit: float, expected: bool) -> None:
    assert Bound("run", "name", value, comparison, limit).holds == expected


def test_a_miss_and_an_unexpected_hold_are_broken() -> None:
    holds, misses = Bound("run", "a", 1, "<=", 2), Bound("run", "b", 3, "<=", 2)
    known = [bound._replace(known_miss="why") for bound in (holds, misses)]
    assert check.broken([holds, misses, *known]) == [misses, known[0]]
    words = [check.verdict(bound) for bound in (holds, misses, *known)]
    assert words == ["holds", "MISSED", "holds, unexpectedly", "known miss"]


def test_prints_all_and_ends_with_1_on_a_miss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check.main()
    printed = capsys.readouterr().out
    assert "…" not in printed
    for part in ("llama-64x8192: of FlashInfer bf16", "known miss", "Without bounds: accuracy"):
        assert part in printed
    missed = COMMITTED[0]._replace(value=1.0)
    monkeypatch.setattr(check, "committed", lambda: [missed, *COMMITTED[1:]])
    with pytest.raises(SystemExit) as end:
        check.main()
    assert end.value.code == 1
    captured = capsys.readouterr()
    assert "MISSED" in captured.out
    assert captured.err == f"1 of {len(COMMITTED)} bounds are broken\n"


def broken(bounds: Any) -> set[str]:
    return {bound.name for bound in check.broken(bounds)}


def test_a_slower_or_wrong_attention_run_is_found() -> None:
    report = deepcopy(result("attention_decode"))
    rows = {row["name"]: row for row in report["microseconds"]}
    rows["decode-mqa-64x65536"]["halfbyte_nvfp4"]["single"] *= 2
    rows["decode-llama-1x131072"]["flashinfer_bf16"]["single"] /= 2
    rows["decode-llama-256x2048-ragged"]["halfbyte_nvfp4"]["back_to_back"] *= 1.5
    rows["store-llama-64"]["halfbyte_nvfp4"]["in_graph"] = 5.1
    rows["prefill-llama-4x2048-on-0"]["sdpa_bf16"]["single"] /= 2
    rows["decode-gemma-64x8192"]["halfbyte_fp8"]["error"] = math.nan
    assert broken(attention.of_decode_run(report)) == {
        "mqa: of the first's rate",
        "llama-1x131072: of FlashInfer bf16",
        "decode-llama-256x2048-ragged: of even lengths",
        "store 64: µs",
        "prefill-llama-4x2048-on-0: of the fastest peer",
        "entries beyond twice bfloat16's error",
    }


def test_other_slower_runs_are_found() -> None:
    report = deepcopy(result("vllm_step_tp2"))
    report["results"]["halfbyte nvfp4 weights and cache"]["64x8192"]["step_ms"] *= 1.5
    assert broken(vllm.of_tensor_parallel(report)) == {"64x8192, of vLLM's fp8"}
    report = deepcopy(result("vllm_step"))
    ours = "halfbyte nvfp4 weights and cache"
    for variant, case, factor in (
        (ours, "128x2048", 0.8),
        (ours, "1x4096", 1.2),
        (f"{ours}, balanced", "64x8192", 0.8),
    ):
        figures = report["results"][variant][case]
        figures["step_ms"] = factor * figures["step_ms"]
    # Known misses that hold are found, too.
    assert broken(vllm.of_steps(report)) == {"128x2048, ms", "1x4096, ms"}
    report = deepcopy(result("vllm_step_qwen3_30b_a3b_in_place"))
    report["results"][ours]["1x2048"]["step_ms"] *= 1.5
    assert broken(vllm.of_qwen3_moe(report)) == {"1x2048, ms"}
    report = deepcopy(result("vllm_step_qwen3_30b_a3b"))
    report["results"]["vllm bf16"]["64x4096"]["prefill_tokens_per_s"] *= 1.5
    assert broken(vllm.of_qwen3_moe_prefill(report)) == {"prefill, of vLLM's bf16"}
    report = deepcopy(result("vllm_step_gpt_oss_20b"))
    report["results"]["vllm mxfp4 experts"]["16x1024"]["step_ms"] *= 0.7
    assert broken(vllm.of_gpt_oss(report)) == {"16x1024, of vLLM's best"}
    report = deepcopy(result("decode_step"))
    for step in report["steps"]:
        if step["kv_cache_dtype"] == "nvfp4":
            step["step_ms"] *= 1.3
    assert broken(attention.of_decode_step(report)) == {"ms gained, of those saved"}
    report = deepcopy(result("attention_cpu"))
    report["milliseconds"][0] |= {"sdpa_bf16": 0.1}
    assert broken(attention.of_cpu_run("attention_cpu", report)) == {"1x8192: SDPA, of ours"}
    report = deepcopy(result("kv_recipes"))
    for row in report["models"]["gemma-3-270m"]:
        if row["kv_recipe"] == "accurate":
            row["kl_divergence"] *= 2
            row["nll_increase"] += 1
    assert broken(recipes.of_accuracy(report)) == {
        "gemma-3-270m, accurate: KL, of fp8's",
        "gemma-3-270m, accurate: NLL, fp8's",
    }
