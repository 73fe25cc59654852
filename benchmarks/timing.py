"""Timing of calls in CUDA graphs, with contenders interleaved. All times are in µs.

On a GPU a call is captured in a CUDA graph, unless it syncs (then `graph` is false).

    single        median of replays timed one by one
    back_to_back  mean of consecutive replays; with several rounds, the median
    in_graph      per call of a graph of many calls, with a small kernel (`spacer`) before each,
                  minus the time of the spacers alone: so no call overlaps with the previous call,
                  which in a model is another layer's

Calls rotate over copies of the data that together exceed the caches. Replays are queued behind a
kernel that keeps the GPU busy, because the host takes 3 to 17 µs to launch a graph. The GPU's own
launch time, some 3 µs or 2 in a row, is included in the first two. Contenders are interleaved
(`measure_in_turns`), so that no contender alone gets the boosted clock.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch

from halfbyte.measure import timing
from halfbyte.measure.timing import (
    BUDGET_US,
    CYCLES_PER_US,
    Call,
    Stopwatch,
    Times,
    cpu_microseconds,
    gpu_microseconds,
    series,
)

_ROW_REPLAYS = 5
"""Replays per round of a graph of many calls."""
_HEAD_START_CYCLES = 50 * CYCLES_PER_US
"""GPU busy cycles per queued replay, to keep the host ahead."""
_LAYER_ROUNDS = {"cuda": 4, "cpu": 2}
_LAYER_BUDGET_US = {"cuda": 2e5, "cpu": 3e5}
_HOT_TOKENS, _REST_S = 256, 0.05
"""From this M on a GPU reaches its power limit, so it idles before every turn."""


class Row(NamedTuple):
    """A graph of calls with a spacer before each, and a graph of only the spacers."""

    replay: Call
    spacers: Call
    calls: int


class Ready(NamedTuple):
    """Calls after warm-up and, on a GPU, capture if possible."""

    calls: Sequence[Call]
    captured: bool
    row: Row | None = None


def ready(calls: Sequence[Call], device: torch.device, *, in_graph: bool = False) -> Ready:
    """Prepare calls with the same work on different data.

    Args:
        in_graph: also capture a graph of many calls.
    """
    for call in calls[:2]:
        call()
    if device.type != "cuda":
        return Ready(calls, False)
    torch.cuda.synchronize()
    if waits_for_host(calls[0]):
        return Ready(calls, False)
    pool = torch.cuda.graph_pool_handle()
    captured = [capture([call], pool) for call in calls]
    return Ready(captured, True, _captured_row(calls, device, pool) if in_graph else None)


def measure(calls: Sequence[Call], device: torch.device, *, in_graph: bool = False) -> Times:
    """`single`, `back_to_back`, on a GPU `graph` and, if requested, `in_graph` of calls."""
    contender = ready(calls, device, in_graph=in_graph)
    return measure_in_turns({"": contender}, device, rounds=1)[""]


def measure_in_turns(
    contenders: Mapping[str, Ready],
    device: torch.device,
    rounds: int,
    budget_us: float | None = None,
    rest_s: float = 0.0,
) -> dict[str, Times]:
    """As `measure`, by name, with the repetitions of all contenders interleaved.

    Args:
        budget_us: per contender and series of repetitions; None for the default of `measure`.
        rest_s: seconds to idle before each turn, so that heat and power of one contender do not
            slow down the next.
    """
    budget = (BUDGET_US[device.type] if budget_us is None else budget_us) / rounds
    turns = {name: cycle(contender.calls) for name, contender in contenders.items()}
    singles: dict[str, list[float]] = {name: [] for name in contenders}
    in_a_row: dict[str, list[float]] = {name: [] for name in contenders}
    in_graph: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(turns)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            time.sleep(rest_s)
            elapsed = _stopwatch(device, contenders[name].captured)
            some, mean = series(turns[name], elapsed, budget, rounds)
            singles[name] += some
            in_a_row[name].append(mean)
            if row := contenders[name].row:
                in_graph[name] += _in_graph(row, budget)
    result = {}
    for name, contender in contenders.items():
        times: Times = {
            "single": round(statistics.median(singles[name]), 2),
            "back_to_back": round(statistics.median(in_a_row[name]), 2),
        }
        if in_graph[name]:
            times["in_graph"] = round(statistics.median(in_graph[name]), 2)
        result[name] = {**times, "graph": contender.captured} if device.type == "cuda" else times
    return result


def measure_layers(
    contenders: Mapping[str, Ready], device: torch.device, tokens: int
) -> dict[str, Times]:
    """`measure_in_turns` for calls of a layer with so many tokens."""
    kind = device.type
    rest = _REST_S if kind == "cuda" and tokens >= _HOT_TOKENS else 0.0
    return measure_in_turns(contenders, device, _LAYER_ROUNDS[kind], _LAYER_BUDGET_US[kind], rest)


def measure_empty(device: torch.device) -> Times:
    """Times of a kernel that does nothing, on a GPU."""
    empty = ready([spacer(device)], device, in_graph=True)
    return measure_in_turns({"": empty}, device, _LAYER_ROUNDS["cuda"])[""]


def waits_for_host(call: Call) -> bool:
    """Whether a call syncs the GPU with the host, which a graph cannot capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return False


@dataclass(frozen=True)
class Replay:
    """A captured graph to call."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]
    """What was captured: the graph reads their tensors at the addresses of the capture."""

    def __call__(self) -> None:
        """Queue the graph."""
        self.graph.replay()


def capture(calls: Sequence[Call], pool: Any = None) -> Call:
    """Capture calls in one CUDA graph and return its replay; graphs of a pool share memory."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    graph.replay()  # the first replay also uploads the graph to the GPU
    return Replay(graph, calls)


def _captured_row(calls: Sequence[Call], device: torch.device, pool: Any) -> Row:
    row = whole_turns(calls)
    space = spacer(device)
    spaced = [each for call in row for each in (space, call)]
    return Row(capture(spaced, pool), capture([space] * len(row), pool), len(row))


@cache
def spacer(device: torch.device) -> Call:
    """A kernel that fills a single value; cached, because graphs keep the value's address."""
    return partial(torch.zeros(1, device=device).fill_, 0.0)


def whole_turns(calls: Sequence[Call]) -> list[Call]:
    """At least `IN_A_ROW` calls, each equally often, so that all have equally cold data."""
    return list(calls) * -(-timing.IN_A_ROW // len(calls))


def _in_graph(row: Row, budget: float) -> list[float]:
    times: list[float] = []
    while len(times) < _ROW_REPLAYS and sum(times) * row.calls <= budget:
        spaced, alone = _replay_microseconds([row.replay]), _replay_microseconds([row.spacers])
        times.append((spaced - alone) / row.calls)
    return times


def _stopwatch(device: torch.device, captured: bool) -> Stopwatch:
    if device.type != "cuda":
        return cpu_microseconds
    return _replay_microseconds if captured else gpu_microseconds


_replay_microseconds = partial(gpu_microseconds, head_start=_HEAD_START_CYCLES)
