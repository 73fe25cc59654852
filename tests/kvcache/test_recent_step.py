"""When a step's tokens may go to the rings before its attention."""

import itertools

import numpy as np
import pytest

from halfbyte.kvcache.recent_step import RecentStep, may_write_first


def reads_survive(start: int, count: int, tokens: int, ring: int) -> bool:
    """By definition: slot by slot."""
    held = dict[int, int]()
    for position in range(start + count):
        held[position % ring] = position
    read = range(max(start - tokens + 1, 0), start)
    return all(held[position % ring] == position for position in read)


@pytest.mark.parametrize(("tokens", "ring"), [(1, 1), (4, 4), (4, 6), (8, 12)])
def test_only_if_all_reads_survive(tokens: int, ring: int) -> None:
    for start, count in itertools.product(range(3 * ring), range(1, 3 * ring)):
        expected = reads_survive(start, count, tokens, ring)
        found = may_write_first(np.array([start]), np.array([count]), tokens, ring)
        assert found == expected, (start, count)
        # The host may count drafts that were rejected: earlier starts are as safe.
        if found and start:
            assert all(reads_survive(i, count, tokens, ring) for i in range(start))


def test_one_sequence_decides_for_all() -> None:
    tokens, ring = 4, 6

    def step(lengths: list[int], counts: list[int]) -> RecentStep:
        entries = list(range(1, len(lengths) + 1))
        return RecentStep.of(tokens, ring, entries, lengths, counts, [range(0)] * len(lengths))

    assert step([100, 7], [100, 1]).write_first
    assert step([100, 7], [100, 1]).rows.tolist() == [94, 95, 96, 97, 98, 99, 100]
    assert not step([100, 90], [100, 40]).write_first
    assert step([], []).write_first
