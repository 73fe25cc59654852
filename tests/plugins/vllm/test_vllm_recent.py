"""Which request has which ring, and what it lacks, told by vLLM's scheduler; without vLLM."""

import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.plugins.vllm import recent
from halfbyte.plugins.vllm.recent import RingEntries, running_step

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


class _Runner:
    """As vLLM's model runner: the order of a step's rows is its own."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))

    def execute_model(self, scheduler_output: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        self.input_batch = SimpleNamespace(req_ids=sorted(counts, reverse=True))
        return [running_step(sum(counts.values()), len(counts), CPU) for _ in range(2)]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its class, in a module of its own."""
    module: Any = ModuleType("runner")
    module.GPUModelRunner = type("GPUModelRunner", (_Runner,), {})
    output: Any = ModuleType("output")
    for name, names in recent._SCHEDULED.items():
        setattr(output, name, make_dataclass(name, names))
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", output)
    monkeypatch.setitem(sys.modules, recent._RUNNER, module)
    monkeypatch.setattr(recent, "ring_tokens", lambda config: 8)
    return module


def test_metadata_is_told_of_the_running_step(runner: Any) -> None:
    assert not recent.is_installed()
    recent.install()
    assert recent.is_installed()
    one = runner.GPUModelRunner()
    first, second = one.execute_model(scheduled(new={"a": 0, "b": 16}, counts={"a": 3, "b": 2}))
    assert first is second  # of all groups of layers
    assert first.entries.tolist() == [1, 0]
    assert [found.number for found in first.missing] == [0]
    assert running_step(5, 2, CPU) is None  # a dummy run's
    (step, _) = one.execute_model(scheduled(cached={"a": 3}, counts={"a": 1}, finished={"b"}))
    assert step.entries.tolist() == [0]
    assert one.execute_model(scheduled(counts={}, finished={"a"})) == [None, None]


def test_another_step_than_the_scheduler_s_is_an_error(runner: Any) -> None:
    runner.GPUModelRunner.execute_model = lambda self, _: running_step(4, 2, CPU)
    recent.install()
    one = runner.GPUModelRunner()
    one.input_batch = SimpleNamespace(req_ids=["a"])
    with pytest.raises(RuntimeError, match="2 requests and 4 tokens, the scheduler's has 1 and 3"):
        one.execute_model(scheduled(new={"a": 0}, counts={"a": 3}))


def test_a_scheduler_that_says_less_is_left_alone(
    runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    output: Any = sys.modules["vllm.v1.core.sched.output"]
    output.NewRequestData = make_dataclass("NewRequestData", ["req_id"])
    recent.install()
    assert not recent.is_installed()
    assert "NewRequestData has no num_computed_tokens" in caplog.text
    assert runner.GPUModelRunner.execute_model is _Runner.execute_model


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
