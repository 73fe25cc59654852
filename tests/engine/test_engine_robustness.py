"""A few rounds of `robustness.py`, which can run for longer by itself."""

import pytest

from engine.robustness import ENGINES, run


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine[0])
def test_failures_in_any_order_leave_the_engine_right(engine: tuple[str, dict]) -> None:
    counts = run(seed=1, seconds=60, max_rounds=4, descriptions=[engine], cases=4, interrupts=False)
    assert counts["rounds"] == 4
    assert counts["requests"] >= 4
