"""How long calls take, and how fast this machine reads and copies memory.

On a GPU every call is captured in a CUDA graph. `single` is the median of replays timed one by one,
`back_to_back` the mean of replays in a row; calls on different copies of the data take turns, so
that each finds its data outside the caches. Plans, which depend on lengths alone, are made before.
A call that waits for the host cannot be captured: it
is timed as it is, its launches included, and the times say so (`graph` is false).

Replays are asked for while another kernel keeps the GPU busy, so that none waits for the host, who
takes 3 to 17 µs to start a graph: times are the GPU's. What it takes itself to start a graph, some
3 µs for one and 2 in a row, is in both. For calls of a few µs there is a third: `in_graph`, by a
graph that holds a row of calls and before each of them a kernel that does next to nothing
(`spacer`), less what those take by themselves. So nobody gains by beginning before a call of his
own has ended, which in a model's step is not in front of him.

Where the times of several are compared to a few percent, their repetitions take turns
(`measure_in_turns`): a GPU's clock moves while it works, and nobody shall have it to himself.
`back_to_back` is then the median of the rounds' means.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]
Times = dict[str, float | bool]
_SINGLES = 40
_IN_A_ROW = 20
_ROW_REPLAYS = 5
"""Of a graph of so many, in every round."""
_HEAD_START_CYCLES = 2000 * 50
"""Of the GPU's clock, which has up to 2,000 of them in a µs: how far the host is to be ahead of the
GPU, and as much again for every replay but the first."""
_BUDGET_US = {"cuda": 1e6, "cpu": 3e5}
"""Per series of repetitions: slow calls are repeated less often, down to three times."""


class Row(NamedTuple):
    """A graph that holds some calls and a kernel before each of them, and one of these kernels."""

    replay: Call
    spacers: Call
    calls: int


class Ready(NamedTuple):
    """Calls that can be timed: warmed up, on a GPU captured if they can be."""

    calls: Sequence[Call]
    captured: bool
    row: Row | None = None


def ready(calls: Sequence[Call], device: torch.device, *, in_graph: bool = False) -> Ready:
    """Prepare calls that do the same work on different data.

    Args:
        in_graph: capture a row of them in one graph as well, if they can be captured.
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
    """Times of calls that do the same work on different data, in µs.

    Args:
        in_graph: as for `ready`.

    Returns:
        `single`, `back_to_back`, and on a GPU `graph`; `in_graph` of those who are ready for it.
    """
    subject = ready(calls, device, in_graph=in_graph)
    return measure_in_turns({"": subject}, device, rounds=1)[""]


def measure_in_turns(
    subjects: Mapping[str, Ready],
    device: torch.device,
    rounds: int,
    budget_us: float | None = None,
    rest_s: float = 0.0,
) -> dict[str, Times]:
    """Times of several by name, as of `measure`, each repeated some of the times in every round.

    Args:
        budget_us: per subject and series of repetitions; by default as for `measure`.
        rest_s: seconds that the machine rests before a subject's turn, so that nobody pays for the
            heat and power of the one before.
    """
    budget = (_BUDGET_US[device.type] if budget_us is None else budget_us) / rounds
    turns = {name: cycle(subject.calls) for name, subject in subjects.items()}
    series: dict[str, list[_Series]] = {name: [] for name in subjects}
    in_graph: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(turns)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            time.sleep(rest_s)
            elapsed = _stopwatch(device, subjects[name].captured)
            series[name].append(_series(turns[name], elapsed, budget, rounds))
            if row := subjects[name].row:
                in_graph[name] += _in_graph(row, budget)
    result = {}
    for name, subject in subjects.items():
        singles = [single for part in series[name] for single in part.singles]
        times: Times = {
            "single": round(statistics.median(singles), 2),
            "back_to_back": round(statistics.median(part.in_a_row for part in series[name]), 2),
        }
        if in_graph[name]:
            times["in_graph"] = round(statistics.median(in_graph[name]), 2)
        result[name] = {**times, "graph": subject.captured} if device.type == "cuda" else times
    return result


def waits_for_host(call: Call) -> bool:
    """Whether a call on a GPU synchronizes, which a graph cannot hold."""
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


def capture(calls: Sequence[Call], pool: Any = None) -> Call:
    """Replay of calls captured in one CUDA graph; graphs of a pool share what they allocate."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    graph.replay()  # the first replay of a graph also sends it to the GPU
    return graph.replay


def _captured_row(calls: Sequence[Call], device: torch.device, pool: Any) -> Row:
    row = whole_turns(calls)
    space = spacer(device)
    spaced = [each for call in row for each in (space, call)]
    return Row(capture(spaced, pool), capture([space] * len(row), pool), len(row))


@cache
def spacer(device: torch.device) -> Call:
    """A kernel that fills a single value.

    Kept, because graphs write to where the value was when they were captured.
    """
    return partial(torch.zeros(1, device=device).fill_, 0.0)


def whole_turns(calls: Sequence[Call]) -> list[Call]:
    """At least `_IN_A_ROW` calls, each as often as any other.

    So a call's data is as far back in a row of replays as in one replay.
    """
    return list(calls) * -(-_IN_A_ROW // len(calls))


class _Series(NamedTuple):
    singles: list[float]
    in_a_row: float
    """Mean."""


def _series(
    calls: Iterator[Call], elapsed: Callable[[Sequence[Call]], float], budget: float, rounds: int
) -> _Series:
    once = elapsed([next(calls)])
    most = max(-(-3 // rounds), int(budget / max(once, 1e-3)))
    singles = [elapsed([next(calls)]) for _ in range(min(-(-_SINGLES // rounds), most))]
    row = list(islice(calls, min(_IN_A_ROW, most)))
    return _Series(singles, elapsed(row) / len(row))


def _in_graph(row: Row, budget: float) -> list[float]:
    """Times per call of some replays."""
    times: list[float] = []
    while len(times) < _ROW_REPLAYS and sum(times) * row.calls <= budget:
        spaced, alone = _replay_microseconds([row.replay]), _replay_microseconds([row.spacers])
        times.append((spaced - alone) / row.calls)
    return times


def _stopwatch(device: torch.device, captured: bool) -> Callable[[Sequence[Call]], float]:
    """What tells how long calls take, one after the other, in µs."""
    if device.type != "cuda":
        return _cpu_microseconds
    return _replay_microseconds if captured else _gpu_microseconds


def _replay_microseconds(replays: Sequence[Call]) -> float:
    return _gpu_microseconds(replays, _HEAD_START_CYCLES * len(replays))


def _gpu_microseconds(calls: Sequence[Call], head_start: int = 0) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start:
        torch.cuda._sleep(head_start)  # a kernel that only counts cycles
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def _cpu_microseconds(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6


def bandwidths(device: torch.device) -> tuple[float, float]:
    """(read, copy) in TB/s: a plain reduction over 4 GiB, less where memory is short, and a copy.

    A copy counts the bytes read and the bytes written. It is PyTorch's or a product with 1,
    whichever is faster: on a GPU its copies can be the driver's.
    """
    if device.type == "cuda":
        num_bytes = min(2**32, torch.cuda.mem_get_info(device)[0] // 8)
    else:
        num_bytes = 2**27
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = measure([data.sum], device)["single"]
    half = data.shape[0] // 2
    to, source = data[:half], data[half : 2 * half]
    ways: tuple[Call, ...] = (lambda: to.copy_(source), lambda: torch.mul(source, 1, out=to))
    copied = min(measure([way], device)["single"] for way in ways)
    return round(data.nbytes / read / 1e6, 4), round(2 * half * 4 / copied / 1e6, 4)
