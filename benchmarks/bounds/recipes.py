"""Bounds on KV recipes: accuracy on real models, and speed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bounds.base import Bound

_MAX_KL = {"SmolLM2-135M-Instruct": (0.6, 0.4), "gemma-3-270m": (1.05, 0.75)}
"""Max KL divergence of `balanced` and of `accurate`, relative to an fp8 cache."""
_KNOWN = {"decode 64 x 8192": "1.086: `plain` gained 3 us, `balanced` 0.4"}


def of_accuracy(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `kv_recipes.json`."""
    bound = partial(Bound, "kv_recipes")
    for model, limits in _MAX_KL.items():
        rows = {(row["kv_cache_dtype"], row["kv_recipe"]): row for row in report["models"][model]}
        fp8 = rows["fp8_e4m3", "plain"]
        for recipe, limit in zip(("balanced", "accurate"), limits, strict=True):
            row, name = rows["nvfp4", recipe], f"{model}, {recipe}"
            kl = row["kl_divergence"] / fp8["kl_divergence"]
            yield bound(f"{name}: KL, of fp8's", kl, "<=", limit)
            yield bound(f"{name}: NLL, fp8's", row["nll_increase"], "<", fp8["nll_increase"])


def of_speed(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `recipe_speed.json`."""
    for case in ("decode 64 x 8192", "decode 8 x 32768"):
        ratio = report["microseconds"][case]["balanced"]["of_plain"]
        known = _KNOWN.get(case, "")
        yield Bound("recipe_speed", f"{case}: balanced, of plain", ratio, "<=", 1.08, known)
