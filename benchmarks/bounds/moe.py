"""Bounds on mixtures of experts beside peers and a plain read of the experts hit."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.bounds.base import Bound
from halfbyte.bench.moe import MOE_SHAPES, MoeBenchmark

Row = dict[str, Any]
_MAX_DECODE_M, _MIN_PREFILL_M = 16, 1024
"""Max M of the bounds on decode steps, min M of the one on prefill."""
_LARGE = 50e6
"""Decode steps that hit at least so many bytes have a bound on the read rate, others on the time
relative to a plain read."""

KNOWN_MISSES = {
    "32x4x2880x2880-mxfp4, M <= 16, from 50 MB: of the read rate": "0.54 at 53 MB, one token: two "
    "products, the second behind the first; 0.70 and 0.79 beyond",
    "of a plain read": "one token: two products, the second behind the first",
}
"""Known misses of the committed run: the end of a bound's name, and the reason."""


def of_moe(report: dict[str, Any], known: Mapping[str, str] | None = None) -> Iterator[Bound]:
    """Bounds of `moe.json`, each on the worst case of a shape; NaN if a case lacks the ratio.

    Args:
        known: `KNOWN_MISSES` for the committed run.
    """
    for bound in _of_moe(report):
        reasons = [why for end, why in (known or {}).items() if bound.name.endswith(end)]
        yield bound._replace(known_miss=reasons[0] if reasons else "")


def _of_moe(report: dict[str, Any]) -> Iterator[Bound]:
    rows: list[Row] = report["microseconds"]
    for shape in map(str, MOE_SHAPES.values()):
        for timing in report["judged_by"]:
            yield from _of_shape(shape, [row for row in rows if row["shape"] == shape], timing)


def _of_shape(shape: str, rows: list[Row], timing: str) -> Iterator[Bound]:
    decode = [row for row in rows if row["m"] <= _MAX_DECODE_M]
    large = [row for row in decode if row["bytes_hit"] >= _LARGE]
    small = [row for row in decode if row["bytes_hit"] < _LARGE]
    prefill = [row for row in rows if row["m"] >= _MIN_PREFILL_M]
    tokens = set(MoeBenchmark.tokens["cuda"])
    measured = tokens & {row["m"] for row in rows}
    yield Bound("moe", f"{shape}: cases", len(measured), "==", len(tokens))
    for name, chosen, ratio, comparison, limit in (
        (
            f"M <= {_MAX_DECODE_M}, from 50 MB: of the read rate",
            large,
            "ours_of_read_rate",
            ">=",
            0.65,
        ),
        (f"M <= {_MAX_DECODE_M}, below 50 MB: of a plain read", small, "ours_over_read", "<=", 1.5),
        (f"M <= {_MAX_DECODE_M}: of the fastest peer", decode, "ours_over_fastest_peer", "<=", 0.7),
        (f"M >= {_MIN_PREFILL_M}: of vLLM bf16", prefill, "ours_over_bf16", "<=", 1.05),
        ("every M: of the fastest peer", rows, "ours_over_fastest_peer", "<=", 1.05),
    ):
        if chosen:
            values = [row[timing][ratio] for row in chosen]
            yield Bound("moe", f"{shape}, {name}", _worst(values, comparison), comparison, limit)


def _worst(values: list[float | None], comparison: str) -> float:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return float("nan")
    return min(known) if comparison == ">=" else max(known)
