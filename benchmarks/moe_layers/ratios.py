"""Rates and time ratios of the benchmark of experts."""

from typing import Any

from benchmarks.linear_layers.ratios import READ, TIMINGS, ours, over, time_of
from benchmarks.peers.moe import MOE_PEERS

Row = dict[str, Any]
MARLIN, BF16 = "vllm_marlin", "vllm_bf16"
NEEDED = (MARLIN, BF16)
"""Peers that must have been measured before one is called the fastest."""


def fastest_peer(row: Row, timing: str) -> str | None:
    """The fastest peer; None if one of `NEEDED`, or of another peer only this timing, is missing.

    A peer that cannot be captured has no time in a graph, but might be the fastest.
    """
    names = [name for name in MOE_PEERS.names() if time_of(row, name, "single")]
    times = {name: time_of(row, name, timing) for name in names}
    known = {name: time for name, time in times.items() if time}
    if len(known) < len(times) or not known.keys() >= set(NEEDED):
        return None
    return min(known, key=lambda name: known[name])


def moe_ratios(row: Row, read_terabytes_per_s: float) -> Row:
    """For each timing, our kernel beside the read rate, a plain read and peers; None if missing.

    Args:
        row: a case with `contenders` and `bytes_hit`.
        read_terabytes_per_s: of a reduction over much memory, in the same run.

    Returns:
        By timing: `ours_of_read_rate` (bytes hit over our time, of the read rate), `ours_over_read`
        (of a plain read of as many bytes), `fastest_peer`, `ours_over_fastest_peer`,
        `ours_over_marlin`, `ours_over_bf16`.
    """
    result: Row = {}
    for timing in TIMINGS:
        own, fastest = time_of(row, ours(row), timing), fastest_peer(row, timing)
        at_read_rate = row["bytes_hit"] / read_terabytes_per_s / 1e6
        result[timing] = {
            "ours_of_read_rate": over(at_read_rate, own),
            "ours_over_read": over(own, time_of(row, READ, timing)),
            "fastest_peer": fastest,
            "ours_over_fastest_peer": over(own, time_of(row, fastest, timing)),
            "ours_over_marlin": over(own, time_of(row, MARLIN, timing)),
            "ours_over_bf16": over(own, time_of(row, BF16, timing)),
        }
    return result
