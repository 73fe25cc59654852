"""Rings of requests and their missing tokens, from vLLM's scheduler output; without vLLM."""

import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.attention.queries import QueryPositions
from halfbyte.kvcache.recent_step import RecentStep
from halfbyte.plugins.vllm import recent, ring_runners
from halfbyte.plugins.vllm.ring_entries import RingEntries
from halfbyte.plugins.vllm.ring_runners import V1, V2, running_rings
from halfbyte.plugins.vllm.ring_step import RingBuffers

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
    return {found.number: found.positions for found in entries.step(requests).missing}


def entries_of(entries: RingEntries, requests: str) -> list[int]:
    found: list[int] = entries.step(requests).entries.tolist()
    return found


def recent_step(
    entries: RingEntries, requests: str, starts: list[int], lengths: list[int], padding: int = 0
) -> RecentStep:
    """A step with lengths on the device, and empty sequences that pad a graph."""
    buffers = RingBuffers(8, entries.tokens, entries.ring, CPU)
    buffers.step(None, 8, 8)
    tokens = starts[-1] + padding
    rings = entries.step(requests)
    step = buffers.step(rings, len(requests) + padding, tokens)
    start_loc = torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32)
    seq_lens = torch.tensor(lengths + [0] * padding, dtype=torch.int32)
    return step.recent_step(QueryPositions.of(start_loc, seq_lens, tokens))


def test_tokens_go_to_the_rings_of_their_requests() -> None:
    entries = RingEntries(capacity=3, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 3, "b": 10}))
    step = recent_step(entries, "ba", [0, 10, 13], [10, 3])  # the runner's order
    assert step.entries.tolist() == [2, 1]
    assert (step.num_tokens, step.write_first, step.missing) == (13, True, [])
    assert step.rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert step.owners.tolist() == [2] * 8 + [1] * 3
    assert step.slots.tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2]
    entries.begin(scheduled(cached={"a": 3, "b": 10}, counts={"a": 1, "b": 1}))
    step = recent_step(entries, "ab", [0, 1, 2], [4, 11])
    assert (step.write_first, step.missing) == (True, [])
    assert step.slots.tolist() == [3, 2]
    entries.begin(scheduled(cached={"a": 4, "b": 11}, counts={"a": 1, "b": 9}))
    assert not recent_step(entries, "ab", [0, 1, 10], [5, 20]).write_first


def test_padding_of_a_graph_goes_to_nobody_s_ring() -> None:
    entries = RingEntries(capacity=3, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 8, "b": 0}, counts={"a": 1, "b": 1}))
    step = recent_step(entries, "ab", [0, 1, 2], [9, 1], padding=2)
    assert step.entries.tolist() == [1, 2, 0, 0]
    assert step.rows.tolist() == [0, 1, 2, 3]
    assert step.owners.tolist() == [1, 2, 0, 0]
    assert step.slots.tolist() == [0, 0, 0, 0]
    dummy = RingBuffers(4, 8, 8, CPU).step(None, 2, 2)
    assert (dummy.entries.tolist(), dummy.rows, dummy.missing) == ([0, 0], None, ())


def test_entries_stay_where_a_graph_reads_them() -> None:
    buffers = RingBuffers(4, 8, 8, CPU)
    entries = RingEntries(capacity=3, tokens=8, ring=8)
    captured = buffers.step(None, 3, 3)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 1, "b": 1}))
    buffers.step(entries.step("ba"), 3, 3)
    assert captured.entries.tolist() == [2, 1, 0]
    buffers.step(None, 3, 3)  # a rank without requests replays the graph
    assert captured.entries.tolist() == [0, 0, 0]


def test_rejected_drafts_leave_what_queries_read() -> None:
    """Also while the scheduler counts them as accepted, until it has the results."""
    entries = RingEntries(capacity=1, tokens=8, ring=8 + 2 * 3)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 40}))
    length = 40  # what is true
    computed = 40  # what the scheduler takes for true
    ring = dict[int, int]()
    for position in range(40):
        ring[position % entries.ring] = position
    for accepted in (0, 3, 1, 0, 0, 2, 3, 0):
        entries.begin(scheduled(cached={"a": computed}, counts={"a": 4}))
        step = recent_step(entries, "a", [0, 4], [length + 4])
        assert (step.write_first, step.missing) == (True, [])
        assert step.slots.tolist() == [(length + i) % entries.ring for i in range(4)]
        for i, slot in enumerate(step.slots.tolist()):
            ring[slot] = length + i
        for query in range(length, length + 4):
            for position in range(query - 8 + 1, query + 1):
                assert ring[position % entries.ring] == position
        computed = length + 4  # one step ahead of what it knows
        length += 1 + accepted


def test_what_came_as_pages_is_missing_once() -> None:
    entries = RingEntries(capacity=3, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 32, "b": 0, "c": 4}, counts={"a": 5, "b": 2, "c": 1}))
    assert missing(entries, "abc") == {0: range(25, 32), 2: range(4)}
    entries.begin(scheduled(cached={"a": 37, "b": 2, "c": 5}, counts={"a": 1, "b": 1, "c": 1}))
    assert missing(entries, "abc") == {}


def test_a_request_that_comes_back_has_nothing_in_its_ring() -> None:
    entries = RingEntries(capacity=2, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 20, "b": 20}))
    # Its entry belongs to another request meanwhile.
    entries.begin(
        scheduled(new={"c": 0}, cached={"a": 20}, counts={"c": 5, "a": 1}, preempted={"b"})
    )
    assert entries_of(entries, "ca") == [2, 1]
    entries.begin(
        scheduled(cached={"a": 21, "b": 16}, counts={"a": 1, "b": 4}, resumed={"b"}, finished={"c"})
    )
    assert entries_of(entries, "ab") == [1, 2]
    assert missing(entries, "ab") == {1: range(9, 16)}
    # Preempted between steps: only its resume is reported, from its first token on.
    entries.begin(scheduled(cached={"b": 0}, counts={"b": 7}, resumed={"b"}))
    assert missing(entries, "b") == {}
    entries.begin(scheduled(cached={"b": 7, "a": 22}, counts={"b": 1, "a": 1}))
    assert missing(entries, "ab") == {}


def test_an_aborted_request_may_come_again_by_its_name() -> None:
    entries = RingEntries(capacity=1, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(new={"a": 16}, counts={"a": 2}, finished={"a"}))
    assert missing(entries, "a") == {0: range(9, 16)}


def test_removed_tokens_are_refilled_where_they_were_overwritten() -> None:
    entries = RingEntries(capacity=1, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(cached={"a": 18}, counts={"a": 1}))
    assert missing(entries, "a") == {0: range(11, 12)}  # 12 to 19 are in the ring
    entries.begin(scheduled(cached={"a": 3}, counts={"a": 9}))
    assert missing(entries, "a") == {0: range(3)}
    entries.begin(scheduled(cached={"a": 12}, counts={"a": 1}))
    assert missing(entries, "a") == {}


def test_one_that_waits_gives_its_entry_up() -> None:
    entries = RingEntries(capacity=1, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0}, counts={"a": 20}))
    entries.begin(scheduled(new={"b": 0}, counts={"b": 20}))
    assert missing(entries, "b") == {}
    entries.begin(scheduled(cached={"a": 20}, counts={"a": 1}))
    assert missing(entries, "a") == {0: range(13, 20)}


def test_the_longest_idle_gives_its_entry_up() -> None:
    entries = RingEntries(capacity=2, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 20, "b": 20}))
    entries.begin(scheduled(cached={"a": 20}, counts={"a": 1}))
    entries.begin(scheduled(new={"c": 0}, counts={"c": 5}))
    assert entries_of(entries, "c") == [2]
    entries.begin(scheduled(cached={"a": 21}, counts={"a": 1}))
    assert missing(entries, "a") == {}


class _Dispatcher:
    """As vLLM's, of V1: the mode of a step that may run as a full graph."""

    def dispatch(self, num_tokens: int, valid_modes: Any = None, invalid_modes: Any = None) -> str:
        modes = set(valid_modes or ("full", "piecewise", "none")) - set(invalid_modes or ())
        return next(mode for mode in ("full", "piecewise", "none") if mode in modes)


class _Manager:
    """As vLLM's, of V2."""

    def dispatch(
        self, num_reqs: int, uniform_token_count: int | None, max_query_len: int | None = None
    ) -> str:
        is_bounded = uniform_token_count is not None or max_query_len is not None
        return "full" if is_bounded else "piecewise"


class _Runner:
    """As vLLM's model runner: the order of a step's rows is its own."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))

    def __init__(self) -> None:
        self.cudagraph_dispatcher = _Dispatcher()
        self.input_batch = SimpleNamespace(req_ids=[])

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        self.input_batch.req_ids = sorted(counts, reverse=True)
        mode = self.cudagraph_dispatcher.dispatch(len(counts), valid_modes={"full", "piecewise"})
        return mode, running_rings(), running_rings()


class _RunnerV2(_Runner):
    def __init__(self) -> None:
        self.cudagraph_manager = _Manager()

    def prepare_inputs(self, counts: dict[str, int]) -> Any:
        return SimpleNamespace(req_ids=sorted(counts, reverse=True))

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        mode = self.cudagraph_manager.dispatch(len(counts), uniform_token_count=1, max_query_len=1)
        assert running_rings() is None  # whose order is not known yet
        if not dummy_run:
            self.prepare_inputs(counts)
        return mode, running_rings(), running_rings()


@pytest.fixture(params=[V1, V2])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its class, in a module of its own."""
    module: Any = ModuleType("runner")
    base = _Runner if request.param == V1 else _RunnerV2
    module.GPUModelRunner = type("GPUModelRunner", (base,), {})
    output: Any = ModuleType("output")
    for name, names in ring_runners._SCHEDULED.items():
        setattr(output, name, make_dataclass(name, names))
    config: Any = ModuleType("config")
    config.CUDAGraphMode = SimpleNamespace(FULL="full")
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", output)
    for name in (V1, V2):
        another: Any = ModuleType("another")
        another.GPUModelRunner = type("Another", (_RunnerV2,), {})
        monkeypatch.setitem(sys.modules, name, another)
    monkeypatch.setitem(sys.modules, request.param, module)
    module.name = request.param
    module.base = base
    return module


def install() -> None:
    ring_runners.install(lambda config: RingEntries(config.scheduler_config.max_num_seqs, 8, 8))


def test_metadata_gets_the_running_step(runner: Any) -> None:
    assert not ring_runners.is_wrapped(runner.name)
    install()
    install()
    assert ring_runners.is_wrapped(runner.name)
    one = runner.GPUModelRunner()
    step = scheduled(new={"a": 0, "b": 16}, counts={"a": 3, "b": 2})
    mode, first, second = one.execute_model(step)
    assert first is second  # of all groups of layers
    assert first.entries.tolist() == [2, 1]
    assert first.counts.tolist() == [2, 3]
    assert [found.number for found in first.missing] == [0]
    assert mode == "piecewise"  # its ring is filled from the pages
    assert running_rings() is None  # a dummy run's
    mode, rings, _ = one.execute_model(
        scheduled(cached={"a": 3}, counts={"a": 1}, finished={"b"}), None
    )
    assert (mode, rings.entries.tolist()) == ("full", [1])
    assert one.execute_model(scheduled(counts={}, finished={"a"}))[1:] == (None, None)


def test_dummy_steps_hold_no_rings(runner: Any) -> None:
    if runner.name == V1:
        pytest.skip("its dummy steps do not run `execute_model`")
    install()
    one = runner.GPUModelRunner()
    unknown = SimpleNamespace(num_scheduled_tokens={"dummy": 1})
    assert one.execute_model(unknown, None, dummy_run=True) == ("full", None, None)
    assert one.execute_model(unknown, None, True) == ("full", None, None)


def test_without_rings_nothing_is_followed(runner: Any) -> None:
    ring_runners.install(lambda config: None)
    one = runner.GPUModelRunner()
    step = scheduled(new={"a": 16}, counts={"a": 1})
    assert one.execute_model(step) == ("full", None, None)


def test_another_step_than_the_scheduler_s_is_an_error() -> None:
    entries = RingEntries(capacity=2, tokens=8, ring=8)
    entries.begin(scheduled(new={"a": 0, "b": 0}, counts={"a": 3, "b": 1}))
    buffers = RingBuffers(4, 8, 8, CPU)
    with pytest.raises(RuntimeError, match="1 requests and 4 tokens, the scheduler's has 2 and 4"):
        buffers.step(entries.step("ab"), 1, 4)
    with pytest.raises(RuntimeError, match="2 requests and 3 tokens, the scheduler's has 2 and 4"):
        buffers.step(entries.step("ab"), 2, 3)


def test_a_scheduler_that_says_less_is_left_alone(
    runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    output: Any = sys.modules["vllm.v1.core.sched.output"]
    output.NewRequestData = make_dataclass("NewRequestData", ["req_id"])
    install()
    assert not ring_runners.is_wrapped(runner.name)
    assert "NewRequestData has no num_computed_tokens" in caplog.text
    assert runner.GPUModelRunner.execute_model is runner.base.execute_model


class _FullGraphs:
    def has_full_cudagraphs(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("compilation_config", "cudagraph_mode", _FullGraphs(), "full CUDA graphs"),
        ("parallel_config", "enable_dbo", True, "micro-batches"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode"),
        (None, "speculative_config", SimpleNamespace(method="eagle"), "drafts by eagle"),
        (None, "ec_transfer_config", object(), "an encoder's connector"),
        (
            None,
            "kv_transfer_config",
            SimpleNamespace(kv_load_failure_policy="recompute"),
            "kv_load_failure_policy recompute",
        ),
    ],
)
def test_where_there_are_no_rings(
    monkeypatch: pytest.MonkeyPatch, part: str | None, name: str, value: Any, reason: str
) -> None:
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        parallel_config=SimpleNamespace(data_parallel_size=2),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        speculative_config=SimpleNamespace(method="ngram"),
    )
    monkeypatch.setattr(ring_runners, "is_wrapped", lambda name: True)
    monkeypatch.setattr(ring_runners, "can_avoid_full_graphs", lambda name: False)
    assert recent._why_no_rings(config) == []
    setattr(getattr(config, part) if part else config, name, value)
    (found,) = recent._why_no_rings(config)
    assert found.startswith(reason)
    monkeypatch.setattr(ring_runners, "is_wrapped", lambda name: False)
    assert len(recent._why_no_rings(config)) == 2


def test_model_runner_v2_has_rings_but_not_with_data_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_runners, "is_wrapped", lambda name: name == V2)
    monkeypatch.setattr(ring_runners, "can_avoid_full_graphs", lambda name: True)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=_FullGraphs()),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        speculative_config=None,
        use_v2_model_runner=True,
    )
    assert recent._why_no_rings(config) == []
    config.parallel_config.data_parallel_size = 2
    assert recent._why_no_rings(config) == ["data parallel with model runner V2"]
