"""Interleaved times of graphs."""

import pytest
import torch

from benchmarks.timing import (
    capture,
    measure,
    measure_in_turns,
    ready,
    waits_for_host,
    whole_turns,
)

CPU = torch.device("cpu")


@pytest.fixture
def two_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.measure.timing.SINGLES", 2)
    monkeypatch.setattr("halfbyte.measure.timing.IN_A_ROW", 2)


@pytest.mark.usefixtures("two_repetitions")
def test_repetitions_take_turns() -> None:
    order: list[str] = []
    contenders = {
        name: ready([lambda name=name: order.append(name)], CPU)  # type: ignore[misc]
        for name in "ab"
    }
    order.clear()
    times = measure_in_turns(contenders, CPU, rounds=2)
    # Each round: one to choose the repetitions, one single, two back to back; in turns who begins.
    assert "".join(order) == "aaaabbbbbbbbaaaa"
    assert set(times) == {"a", "b"}
    assert set(times["a"]) == {"single", "back_to_back"}


@pytest.mark.parametrize(("copies", "expected"), [(1, 20), (3, 21), (15, 30), (20, 20), (33, 33)])
def test_every_copy_has_as_many_turns(copies: int, expected: int) -> None:
    calls = [lambda: None for _ in range(copies)]
    row = whole_turns(calls)
    assert len(row) == expected
    assert row == calls * (expected // copies)


@pytest.mark.gpu
def test_capture_replays_and_calls_that_wait_are_found() -> None:
    x = torch.zeros(3, device="cuda")

    def add() -> None:
        x.add_(1)

    replay = capture([add])  # called once, captured, replayed once
    replay()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 3
    subject = ready([add], torch.device("cuda"), in_graph=True)
    assert subject.row is not None
    times = measure_in_turns({"": subject}, torch.device("cuda"), rounds=2)[""]
    assert 0.2 < times["in_graph"] < times["single"]
    x.zero_()
    subject.row.replay()
    assert x.tolist() == [float(subject.row.calls)] * 3
    assert not waits_for_host(add)
    assert waits_for_host(lambda: x.max().item())
    assert torch.cuda.get_sync_debug_mode() == 0
    assert measure([add], torch.device("cuda"))["graph"] is True
    assert measure([lambda: x.max().item()], torch.device("cuda"))["graph"] is False
    with pytest.raises(RuntimeError, match="not this one"):
        waits_for_host(_raise)


def _raise() -> None:
    raise RuntimeError("not this one")
