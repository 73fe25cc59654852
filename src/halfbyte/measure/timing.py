"""Timing of calls, and the machine's memory bandwidth. All times are in µs.

`single` is the median of calls timed one by one, `back_to_back` the mean of consecutive calls.
Data that fit into the caches give times that are too good, so calls rotate over `copies`. On a GPU
they are queued behind a kernel that runs until the host has launched them all, so that times
exclude the host.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeVar

import torch

from halfbyte.measure.machine import bytes_beyond_caches

T = TypeVar("T")
Call = Callable[[], Any]
Times = dict[str, float | bool]
Stopwatch = Callable[[Sequence[Call]], float]
SINGLES, IN_A_ROW = 40, 20
BUDGET_US = {"cuda": 1e6, "cpu": 3e5}
"""Max µs per series: slow calls are repeated less often, but at least three times."""
CYCLES_PER_US = 2000  # max GPU clock
_ROTATED_BYTES = {"cuda": 400_000_000, "cpu": bytes_beyond_caches()}
_MAX_COPIES = {"cuda": 256, "cpu": 64}


def copies(num_bytes: int, device: torch.device) -> int:
    """Number of copies of data that together exceed L2 or a CPU's caches."""
    return min(_MAX_COPIES[device.type], 1 + _ROTATED_BYTES[device.type] // max(num_bytes, 1))


def copied(data: T, count: int) -> list[T]:
    """The data and `count - 1` deep copies."""
    return [data, *(deepcopy(data) for _ in range(count - 1))]


def measure(calls: Sequence[Call], device: torch.device) -> Times:
    """`single` and `back_to_back` of calls with the same work on different data."""
    for call in calls[:2]:
        call()
    turns, elapsed = cycle(calls), partial(cpu_microseconds)
    if device.type == "cuda":
        torch.cuda.synchronize()
        launch_us = min(1000.0, cpu_microseconds([next(turns)]))  # capped: a call may sync
        elapsed = partial(gpu_microseconds, head_start=int(2 * launch_us + 50) * CYCLES_PER_US)
    singles, in_a_row = series(turns, elapsed, BUDGET_US[device.type])
    return {"single": round(statistics.median(singles), 2), "back_to_back": round(in_a_row, 2)}


def series(
    turns: Iterator[Call], elapsed: Stopwatch, budget_us: float, rounds: int = 1
) -> tuple[list[float], float]:
    """Times of single calls, and the mean of consecutive calls."""
    once = elapsed([next(turns)])
    max_calls = max(-(-3 // rounds), int(budget_us / max(once, 1e-3)))
    singles = [elapsed([next(turns)]) for _ in range(min(-(-SINGLES // rounds), max_calls))]
    row = list(islice(turns, min(IN_A_ROW, max_calls)))
    return singles, elapsed(row) / len(row)


def gpu_microseconds(calls: Sequence[Call], head_start: int = 0) -> float:
    """GPU time of calls, launched while the GPU is busy for `head_start` cycles per call."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start:
        torch.cuda._sleep(head_start * len(calls))  # a kernel that only counts cycles
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def cpu_microseconds(calls: Sequence[Call]) -> float:
    """Host time of calls."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6


def bandwidths(device: torch.device) -> tuple[float, float]:
    """(read, copy) bandwidth in TB/s: a reduction over up to 4 GiB, and a copy (read + written).

    The copy is the faster of PyTorch's copy, which on a GPU may be the driver's, and a product
    with 1.
    """
    on_gpu = device.type == "cuda"
    num_bytes = min(2**32, torch.cuda.mem_get_info(device)[0] // 8) if on_gpu else 2**27
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = measure([data.sum], device)["single"]
    to, source = data[: len(data) // 2], data[len(data) // 2 :][: len(data) // 2]
    variants: tuple[Call, ...] = (lambda: to.copy_(source), lambda: torch.mul(source, 1, out=to))
    copied = min(measure([variant], device)["single"] for variant in variants)
    return round(data.nbytes / read / 1e6, 4), round(2 * to.nbytes / copied / 1e6, 4)
