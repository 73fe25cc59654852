"""Times and bandwidths."""

import time

import torch

from halfbyte.measure.timing import bandwidths, measure

CPU = torch.device("cpu")


def test_measure_tells_microseconds() -> None:
    times = measure([lambda: time.sleep(0.002)] * 3, CPU)
    assert set(times) == {"single", "back_to_back"}
    assert all(2000 <= value < 20_000 for value in times.values())


def test_measure_repeats_slow_calls_less_often() -> None:
    count = 0

    def slow() -> None:
        nonlocal count
        count += 1
        time.sleep(0.15)

    measure([slow], CPU)
    assert 6 <= count <= 10


def test_bandwidths_are_those_of_a_machine() -> None:
    read, copied = bandwidths(CPU)
    assert 1e-4 < copied < 2
    assert 1e-4 < read < 2
