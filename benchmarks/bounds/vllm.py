"""Bounds on steps inside vLLM."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.bounds.base import Bound

_OURS = "halfbyte nvfp4 weights and cache"
_LONG = "64x8192"
_MAX_MS = {_LONG: 7.8, "128x2048": 6.3, "16x1024": 2.5, "1x4096": 2.25}
_WHY = {"128x2048": "unpacking weights and matmuls add up at 128 tokens (linear_wide_ablation)"}


def _steps(
    bound: Callable[..., Bound],
    figures: dict[str, Any],
    limits: dict[str, float],
    misses: dict[str, str],
) -> Iterator[Bound]:
    """Milliseconds of a variant's steps, by case; `misses` has the reasons of known ones."""
    for case, limit in limits.items():
        step = figures[case]["step_ms"]
        yield bound(f"{case}, ms", step, "<=", limit, known_miss=misses.get(case, ""))


def of_steps(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step.json`: steps and prefill beside vLLM's own variants."""
    bound, rows = partial(Bound, "vllm_step"), report["results"]
    ours, bf16 = rows[_OURS], rows["vllm bf16"]
    yield from _steps(bound, ours, _MAX_MS, _WHY)
    best = min(row[_LONG]["step_ms"] for name, row in rows.items() if name.startswith("vllm"))
    yield bound(f"{_LONG}, of vLLM's best", ours[_LONG]["step_ms"] / best, "<=", 0.48)
    prefill = ours[_LONG]["prefill_tokens_per_s"] / bf16[_LONG]["prefill_tokens_per_s"]
    yield bound("prefill, of vLLM's bf16", prefill, ">=", 1.1)
    held = rows["halfbyte nvfp4 cache"]["kv_cache_tokens"] / bf16["kv_cache_tokens"]
    yield bound("tokens held, of bf16's", held, ">=", 3.5)
    balanced = rows[f"{_OURS}, balanced"][_LONG]["step_ms"] / ours[_LONG]["step_ms"]
    yield bound(f"{_LONG}, balanced of plain", balanced, "<=", 1.06)


_EXPERTS_MAX_MS = {"1x2048": 2.9, "16x1024": 5.5, "64x4096": 8.5, "128x1024": 8.0}


def of_qwen3_moe(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step_qwen3_30b_a3b_in_place.json`: NVFP4 experts, without vLLM's own."""
    bound = partial(Bound, "vllm_step_qwen3_30b_a3b_in_place")
    yield from _steps(bound, report["results"][_OURS], _EXPERTS_MAX_MS, {})


def of_qwen3_moe_prefill(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step_qwen3_30b_a3b.json`, an earlier run with vLLM's own variants."""
    ours, bf16 = (report["results"][name]["64x4096"] for name in (_OURS, "vllm bf16"))
    prefill = ours["prefill_tokens_per_s"] / bf16["prefill_tokens_per_s"]
    yield Bound("vllm_step_qwen3_30b_a3b", "prefill, of vLLM's bf16", prefill, ">=", 0.95)


def of_gpt_oss(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step_gpt_oss_20b.json`: faster than vLLM's own variants."""
    rows = dict(report["results"])
    ours = rows.pop("halfbyte mxfp4 experts, nvfp4 cache")
    for case in _EXPERTS_MAX_MS:
        best = min(row[case]["step_ms"] for row in rows.values())
        step = ours[case]["step_ms"] / best
        yield Bound("vllm_step_gpt_oss_20b", f"{case}, of vLLM's best", step, "<", 1.0)


def of_tensor_parallel(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step_tp2.json`: a step on two GPUs."""
    ours, fp8 = (report["results"][name][_LONG] for name in (_OURS, "vllm fp8 cache"))
    step = ours["step_ms"] / fp8["step_ms"]
    yield Bound("vllm_step_tp2", f"{_LONG}, of vLLM's fp8", step, "<=", 0.6)
