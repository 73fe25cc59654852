"""The cases that `--each-value` runs."""

import pytest

from each_value import smallest_cover

pytest_plugins = ("pytester",)


def test_every_value_is_covered_once() -> None:
    cases = [{("a", str(i)), ("b", str(j))} for i in range(3) for j in range(4)]
    chosen = smallest_cover(cases)
    assert len(chosen) == 4
    assert set[tuple[str, str]]().union(*(cases[i] for i in chosen)) == set().union(*cases)
    assert smallest_cover([{("a", "0")}, {("a", "1")}]) == [0, 1]
    assert smallest_cover([set()]) == [0]


def test_cases_of_one_parametrization_all_run(
    pytester: pytest.Pytester, request: pytest.FixtureRequest
) -> None:
    pytester.makeconftest((request.path.parent / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x,y", [(1, 1), (1, 2), (2, 1)])
        def test_pairs(x, y): ...

        @pytest.mark.parametrize("x", [1, 2, 3])
        @pytest.mark.parametrize("y", [1, pytest.param(2, marks=pytest.mark.slow)])
        def test_product(x, y): ...

        @pytest.mark.parametrize("x", [1, 2, 3])
        @pytest.mark.parametrize("y", [1, 2])
        def test_combinations(x, y): ...

        def test_plain(): ...
        """
    )
    found = pytester.runpytest_inprocess("--each-value", "-m", "not slow")
    found.assert_outcomes(passed=3 + 3 + 3 + 1, deselected=3 + 3)
    pytester.runpytest_inprocess().assert_outcomes(passed=3 + 6 + 6 + 1)
