"""Which request has which ring, and what it lacks, told by vLLM's scheduler; without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.plugins.vllm import recent
from halfbyte.plugins.vllm.recent import RingEntries

CPU = torch.device("cpu")


def scheduled(
    *,
    new: dict[str, int] | None = None,
    cached: dict[str, int] | None = None,
    counts: dict[str, int],
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """As vLLM's `SchedulerOutput`; requests with the tokens that are computed."""
    cached = cached or {}
    return SimpleNamespace(
        finished_req_ids=finished or set(),
        preempted_req_ids=preempted,
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed)
            for name, computed in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=list(cached.values()),
            resumed_req_ids=resumed or set(),
        ),
    )


def missing(entries: RingEntries, requests: str) -> dict[int, range]:
    """Positions by the number of the request."""
    step = entries.step(list(requests), CPU)
    return {found.number: found.positions for found in step.missing}


def test_tokens_go_to_the_rings_of_their_requests() -> None:
    entries = RingEntries(capacity=3, tokens=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 3, "b": 10}))
    step = entries.step(["b", "a"], CPU)  # the runner's order
    assert step.entries.tolist() == [1, 0]
    assert (step.num_tokens, step.is_short, step.missing) == (13, False, [])
    assert step.rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert step.owners.tolist() == [1] * 8 + [0] * 3
    assert step.slots.tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2]
    entries.begin(scheduled(cached={"a": 3, "b": 10}, counts={"a": 1, "b": 1}))
    step = entries.step(["a", "b"], CPU)
    assert (step.is_short, step.missing) == (True, [])
    assert step.slots.tolist() == [3, 2]


def test_what_came_as_pages_is_missing_once() -> None:
    entries = RingEntries(capacity=3, tokens=8)
    entries.begin(scheduled(new={"a": 32, "b": 0, "c": 4}, counts={"a": 5, "b": 2, "c": 1}))
    assert missing(entries, "abc") == {0: range(25, 32), 2: range(4)}
    entries.begin(scheduled(cached={"a": 37, "b": 2, "c": 5}, counts={"a": 1, "b": 1, "c": 1}))
    assert missing(entries, "abc") == {}


def test_a_request_that_comes_back_has_nothing_in_its_ring() -> None:
    entries = RingEntries(capacity=2, tokens=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 20, "b": 20}))
    # Its entry is another's meanwhile.
    entries.begin(
        scheduled(new={"c": 0}, cached={"a": 20}, counts={"c": 5, "a": 1}, preempted={"b"})
    )
    assert entries.step(["c", "a"], CPU).entries.tolist() == [1, 0]
    entries.begin(
        scheduled(cached={"a": 21, "b": 16}, counts={"a": 1, "b": 4}, resumed={"b"}, finished={"c"})
    )
    assert entries.step(["a", "b"], CPU).entries.tolist() == [0, 1]
    assert missing(entries, "ab") == {1: range(9, 16)}
    # Preempted between steps, when only its coming back is told; from its first token on.
    entries.begin(scheduled(cached={"b": 0}, counts={"b": 7}, resumed={"b"}))
    assert missing(entries, "b") == {}
    entries.begin(scheduled(cached={"b": 7, "a": 22}, counts={"b": 1, "a": 1}))
    assert missing(entries, "ab") == {}


def test_an_aborted_request_may_come_again_by_its_name() -> None:
    entries = RingEntries(capacity=1, tokens=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(new={"a": 16}, counts={"a": 2}, finished={"a"}))
    assert missing(entries, "a") == {0: range(9, 16)}


def test_tokens_that_are_taken_back_are_filled_where_they_were_overwritten() -> None:
    entries = RingEntries(capacity=1, tokens=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(cached={"a": 18}, counts={"a": 1}))
    assert missing(entries, "a") == {0: range(11, 12)}  # 12 to 19 are in the ring
    entries.begin(scheduled(cached={"a": 3}, counts={"a": 9}))
    assert missing(entries, "a") == {0: range(3)}
    entries.begin(scheduled(cached={"a": 12}, counts={"a": 1}))
    assert missing(entries, "a") == {}


def test_one_that_waits_gives_its_entry_up() -> None:
    entries = RingEntries(capacity=1, tokens=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(new={"b": 0}, counts={"b": 20}))
    assert missing(entries, "b") == {}
    entries.begin(scheduled(cached={"a": 20}, counts={"a": 1}))
    assert missing(entries, "a") == {0: range(13, 20)}


class _FullGraphs:
    def has_full_cudagraphs(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("compilation_config", "cudagraph_mode", _FullGraphs(), "full CUDA graphs"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallel"),
        ("parallel_config", "enable_dbo", True, "micro-batches"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode"),
        (None, "use_v2_model_runner", True, "model runner V2"),
        (None, "speculative_config", object(), "speculative decoding"),
        (None, "kv_transfer_config", object(), "a KV connector"),
    ],
)
def test_where_there_are_no_rings(
    monkeypatch: pytest.MonkeyPatch, part: str | None, name: str, value: Any, reason: str
) -> None:
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        speculative_config=None,
    )
    monkeypatch.setattr(recent, "is_installed", lambda: True)
    assert recent._why_no_rings(config) == []
    setattr(getattr(config, part) if part else config, name, value)
    (found,) = recent._why_no_rings(config)
    assert found.startswith(reason)
    monkeypatch.setattr(recent, "is_installed", lambda: False)
    assert len(recent._why_no_rings(config)) == 2
