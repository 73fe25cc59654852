"""Requests: their tokens, at a cost that does not grow with their length."""

import pytest

from halfbyte.engine.request import Request
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.engine.token_counts import TokenCounts


class Uncopied(list[int]):
    """A list that allows slices but raises when it is iterated or copied as a whole."""

    def __add__(self, other: object) -> "Uncopied":  # type: ignore[override]
        raise AssertionError("copied as a whole")

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("read as a whole")


def test_tokens_are_slices_of_prompt_and_output() -> None:
    request = Request(0, [0, 1, 2, 3, 4], SamplingParams())
    request.output = [5, 6, 7]
    for start in range(9):
        for stop in range(start, 9):
            assert request.tokens(start, stop) == list(range(start, stop))


def test_tokens_of_a_step_are_all_that_is_read() -> None:
    request = Request(0, Uncopied(range(1000)), SamplingParams())
    request.output = Uncopied(range(1000, 1200))
    assert request.tokens(1199, 1200) == [1199]
    assert request.tokens(996, 1000) == [996, 997, 998, 999]


@pytest.mark.parametrize("output", [[], [7], [5, 9, 5, 7, 5]])
def test_token_counts_have_one_entry_per_distinct_token(output: list[int]) -> None:
    counts = TokenCounts([5, 3, 5, 8])
    for token in output:
        counts.add(token)
    assert sorted(counts.ids.tolist()) == sorted({5, 3, 8, *output})
    ids, times = counts.output
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
        token: output.count(token) for token in output
    }
