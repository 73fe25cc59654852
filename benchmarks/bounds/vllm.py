"""Bounds on steps inside vLLM."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bounds.base import Bound

_OURS = "halfbyte nvfp4 weights and cache"


def of_steps(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `vllm_step.json`, with 64 sequences of 8,192 tokens."""
    bound, rows = partial(Bound, "vllm_step"), report["results"]
    ours, balanced, bf16 = (
        rows[name]["64x8192"] for name in (_OURS, f"{_OURS}, balanced", "vllm bf16")
    )
    best = min(row["64x8192"]["step_ms"] for name, row in rows.items() if name.startswith("vllm"))
    prefill = ours["prefill_tokens_per_s"] / bf16["prefill_tokens_per_s"]
    why = "attention takes 4.8 ms, the linear layers 2.4, the head 0.3, all else 0.7 (vllm_profile)"
    yield bound("step, ms", ours["step_ms"], "<=", 7.8, known_miss=why)
    yield bound("step, of vLLM's best", ours["step_ms"] / best, "<=", 0.48, known_miss=why)
    yield bound("prefill, of vLLM's bf16", prefill, ">=", 1.1)
    yield bound("balanced, of plain", balanced["step_ms"] / ours["step_ms"], "<=", 1.06)
