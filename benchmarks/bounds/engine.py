"""Bounds on decode steps of halfbyte's own engine."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bounds.base import Bound

_MAX_MS = {"64x1024 greedy": 8.0, "1x2048 greedy": 3.0}
_MAX_SAMPLED = 1.05
"""Default sampling, relative to greedy."""
_WHY = {
    "balanced, 1x2048 greedy": "on an H100, where a plain read of the weights takes 1.4 times as "
    "long as on the H200 that the bound is for",
}


def of_steps(report: dict[str, Any]) -> Iterator[Bound]:
    """Bounds of `engine_step.json`: whole steps of `LLM` with compiled layers."""
    bound = partial(Bound, "engine_step")
    for recipe, variants in report["results"].items():
        rows = variants["compiled"]
        for case, limit in _MAX_MS.items():
            why, step = _WHY.get(f"{recipe}, {case}", ""), rows[case]["step_ms"]
            yield bound(f"{recipe}, {case}, ms", step, "<=", limit, known_miss=why)
        sampled = rows["64x1024 default"]["step_ms"] / rows["64x1024 greedy"]["step_ms"]
        yield bound(f"{recipe}, 64x1024 default, of greedy", sampled, "<=", _MAX_SAMPLED)
