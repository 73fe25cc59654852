"""A failed step is rolled back: later tokens are the right ones."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from halfbyte.engine import LLM, SamplingParams
from halfbyte.engine.core import EngineCore
from halfbyte.engine.interrupts import interrupts_deferred
from halfbyte.engine.request import FinishReason, Request
from halfbyte.engine.sampler import Transfer
from models.zoo import make_model, token_ids
from slow import slow

PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=12, seed=3, top_k=30),
]


@pytest.fixture(autouse=True, params=[slow(False), True], ids=["in turn", "ahead"])
def looks_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps are launched before the last one's tokens are read, as on GPUs."""
    make, ahead = EngineCore.__init__, bool(request.param)

    def make_either(core: EngineCore, *args: Any, **options: Any) -> None:
        make(core, *args, **options)
        core.looks_ahead = ahead

    monkeypatch.setattr(EngineCore, "__init__", make_either)
    return ahead


class InjectedError(Exception):
    """The injected error."""


class Interrupter:
    """Calls a function, or raises before or after the call, the n-th time."""

    def __init__(
        self, owner: object, name: str, at: int, error: BaseException, after: bool
    ) -> None:
        self.calls, self.at, self.error, self.after = 0, at, error, after
        self.function: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise self.error
        result = self.function(*args, **kwargs)
        if self.calls == self.at:
            raise self.error
        return result


def run(core: EngineCore, requests: list[Request]) -> int:
    """Step until all requests have ended, also after failures; returns the failed steps' number."""
    failures = 0
    while not all(request.is_finished for request in requests):
        before = [(list(request.output), request.num_computed) for request in requests]
        try:
            core.step()
        except (InjectedError, KeyboardInterrupt):
            failures += 1
            assert [r.output for r in requests] == [output for output, _ in before]
            for request, (_, computed) in zip(requests, before, strict=True):
                assert request.num_computed in (computed, 0)  # 0: it was preempted
        core.check_integrity()
    assert core.tables.allocator.num_used == 0
    return failures


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize(
    "where",
    ["runner.run", "sampler.launch", "tables.append", "tables.pool.layer_pages"],
)
@pytest.mark.parametrize(
    ("architecture", "num_pages"),
    [("llama", 200), slow("llama", 24), slow("gemma2", 200), ("gemma2", 24)],
)
def test_step_that_failed_did_not_happen(
    architecture: str, where: str, at: int, after: bool, num_pages: int
) -> None:
    llm = LLM(
        make_model(architecture), kv_cache_dtype="nvfp4", num_pages=num_pages, max_batched_tokens=32
    )
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    core = llm.core
    *path, name = where.split(".")
    owner: Any = core
    for part in path:
        owner = getattr(owner, part)
    interrupter = Interrupter(owner, name, at, InjectedError(), after)
    requests = [core.request(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    for request in requests:
        core.add(request)
    with core.runner.attached():
        assert run(core, requests) == 1
    assert interrupter.calls > at
    assert [request.output for request in requests] == expected


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_late_failures_leave_nothing_of_finished_requests(after: bool) -> None:
    """Failures after tokens were appended and requests finished."""
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=40)
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    core = llm.core
    for at in range(1, 14):
        requests = [core.request(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
        for request in requests:
            core.add(request)
        Interrupter(core.scheduler, "complete", at, InjectedError(), after)
        try:
            while core.scheduler.has_work:
                try:
                    core.step()
                except InjectedError:
                    core.check_integrity()
        finally:
            del core.scheduler.complete
        assert [request.output for request in requests] == expected
        assert core.tables.allocator.num_used == 0


def test_interrupts_in_every_place_leave_the_next_tokens_right() -> None:
    """Ctrl-C after 1, 2, … lines of the engine's own code."""
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=12, max_batched_tokens=32)
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    core, previous = llm.core, signal.signal(signal.SIGINT, signal.default_int_handler)
    files = ("/engine/core.py", "/engine/scheduler.py", "/kvcache/sequences.py", "/allocator.py")

    def interrupt_at(line: int) -> Callable[..., Any]:
        seen = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith(files):
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    os.kill(os.getpid(), signal.SIGINT)
            return trace

        return trace

    try:
        with core.runner.attached():
            for line in range(1, 1500, 37):
                requests = [core.request(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
                for request in requests:
                    core.add(request)
                interrupted = False
                try:
                    sys.settrace(interrupt_at(line))
                    while not all(request.is_finished for request in requests):
                        core.step()
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    sys.settrace(None)
                core.check_integrity()
                assert interrupted, line
                run(core, requests)
                assert [request.output for request in requests] == expected, line
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("victim", [0, 1], ids=["greedy", "sampled"])
def test_numbers_of_one_request_do_not_end_the_others(victim: int, number: float) -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=20)
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    core = llm.core
    requests = [core.request(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    for request in requests:
        core.add(request)
    function = core.runner.run

    def spoiled(chunks: Any, **options: Any) -> Any:
        logits = function(chunks, **options).clone()
        for i, (seq, _) in enumerate(chunks):
            if seq == requests[victim].id and core.tables.length(seq) == len(PROMPTS[victim]) + 3:
                logits[i] = number
        return logits

    with core.runner.attached():
        core.runner.run = spoiled  # type: ignore[method-assign]
        run(core, requests)
    assert requests[victim].finish_reason == FinishReason.ERROR
    assert requests[victim].error == f"the model's logits have {number} for their largest"
    assert requests[victim].output == expected[victim][:3]
    for i, request in enumerate(requests):
        if i != victim:
            assert request.output == expected[i]
    assert core.tables.allocator.num_used == 0
    del core.runner.run
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected


def test_integrity_sees_slots_that_were_never_computed() -> None:
    core = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=20).core
    request = core.request(PROMPTS[0], PARAMS[0])
    core.looks_ahead = False
    core.add(request)
    core.step()
    core.check_integrity()
    core.tables.append(request.id, 1)
    with pytest.raises(AssertionError, match="slots for 6 tokens, 5 computed"):
        core.check_integrity()
    core.scheduler.rollback()
    core.check_integrity()
    core.tables.add("stray")
    with pytest.raises(AssertionError, match="no running request"):
        core.check_integrity()


def test_new_requests_run_once_a_preemption_is_over() -> None:
    core = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=20).core
    core.looks_ahead = False
    assert core.step() == []  # no work
    first, second = (core.request(p, q) for p, q in zip(PROMPTS[:2], PARAMS, strict=False))
    core.add(first)
    core.step()
    core.scheduler._preempted = True  # as the last step left it
    core.add(second)
    assert {request.id for request, _ in core.step()} == {first.id, second.id}


def test_llm_generates_again_after_a_failed_generation() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4")
    expected = llm.generate(PROMPTS, PARAMS)
    Interrupter(llm.core.runner, "run", 4, InjectedError(), after=False)
    with pytest.raises(InjectedError):
        llm.generate(PROMPTS, PARAMS)
    assert llm.core.tables.allocator.num_used == 0
    assert llm.generate(PROMPTS, PARAMS) == expected


def test_aborts_between_failed_steps(looks_ahead: bool) -> None:
    core = LLM(make_model("llama"), kv_cache_dtype="nvfp4", num_pages=20).core
    first, second = (core.request(p, q) for p, q in zip(PROMPTS[:2], PARAMS, strict=False))
    core.add(first)
    core.add(second)
    Interrupter(core.runner, "run", 2 + looks_ahead, InjectedError(), after=True)
    core.step()
    with pytest.raises(InjectedError):
        core.step()
    core.abort(first, FinishReason.ERROR)
    core.check_integrity()
    run(core, [second])
    assert len(second.output) == 12


def test_interrupts_deferred_waits_for_the_end() -> None:
    done = False

    def interrupted() -> None:
        nonlocal done
        os.kill(os.getpid(), signal.SIGINT)
        done = True

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_deferred():
            interrupted()
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_interrupts_deferred_in_another_thread_changes_nothing() -> None:
    handlers = []

    def work() -> None:
        with interrupts_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("at", [3, 4], ids=["chunk", "first token"])
def test_last_tokens_after_a_failed_step_are_computed_anew(at: int, looks_ahead: bool) -> None:
    """The pages have them in four bits only, which logits would show."""
    prompt, params = (
        token_ids(100, seed=2).tolist(),
        SamplingParams(max_tokens=4, seed=2, logprobs=5),
    )
    llm = LLM(
        make_model("llama"), kv_recipe="balanced", batch_invariant=True, max_batched_tokens=40
    )
    expected = llm.generate([prompt], params)[0]
    core = llm.core
    request = core.request(prompt, params)
    core.add(request)
    Interrupter(core.runner, "run", at, InjectedError(), after=True)
    with core.runner.attached():
        assert run(core, [request]) == 1
    assert request.output == expected.token_ids
    found = [{token: x for token, x, _ in step} for step in request.logprobs]
    wanted = [{t: x.logprob for t, x in step.items()} for step in expected.logprobs or []]
    assert found == wanted


def test_a_second_interrupt_before_the_rollback(
    looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(make_model("llama"), kv_recipe="plain", batch_invariant=True)
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    llm.core.looks_ahead = looks_ahead
    core_module, waits, is_armed = sys.modules[EngineCore.__module__], 0, False
    wait, deferred = Transfer.wait, interrupts_deferred

    def wait_and_interrupt(self: Transfer) -> Any:
        nonlocal waits, is_armed
        waits += 1
        if waits == 4:
            is_armed = True
            raise KeyboardInterrupt
        return wait(self)

    def deferred_too_late() -> Any:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt
        return deferred()

    monkeypatch.setattr(Transfer, "wait", wait_and_interrupt)
    monkeypatch.setattr(core_module, "interrupts_deferred", deferred_too_late)
    requests = [llm.core.request(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    for request in requests:
        llm.core.add(request)
    interrupts = 0
    with llm.core.runner.attached():
        while llm.core.scheduler.has_work:
            try:
                llm.core.step()
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
    assert waits > 4
    assert [request.output for request in requests] == expected
    llm.core.check_integrity()


def test_an_interrupt_while_attention_is_set_restores_it() -> None:
    model = make_model("llama")
    llm = LLM(model, kv_recipe="plain")
    own = model.config._attn_implementation
    Interrupter(model, "set_attn_implementation", 1, KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:1], PARAMS[0])
    assert model.config._attn_implementation == own
