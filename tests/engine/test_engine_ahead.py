"""Steps that are launched before the tokens of the last step are read."""

from typing import Any

import pytest
import torch

from halfbyte.assets import bundled_model_path
from halfbyte.engine import LLM, SamplingParams
from halfbyte.engine.core import EngineCore
from halfbyte.engine.request import Request
from models.zoo import make_model, token_ids

PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=1, seed=1),
    SamplingParams(max_tokens=20, seed=2, logprobs=3, min_tokens=6),
    SamplingParams(max_tokens=7, seed=3, top_k=30, min_p=0.01),
]


class Launches:
    """The calls of a core's runner: whether the host knew the tokens."""

    def __init__(self, core: EngineCore) -> None:
        self.ahead: list[bool] = []
        self._run = core.runner.run
        core.runner.run = self  # type: ignore[assignment, method-assign]

    def __call__(self, chunks: Any, *, tokens: torch.Tensor | None = None) -> torch.Tensor:
        self.ahead.append(tokens is not None)
        if tokens is not None:
            assert [ids for _, ids in chunks] == [[0]] * len(tokens)
        return self._run(chunks, tokens=tokens)


def make_llm(architecture: str = "llama", **options: Any) -> LLM:
    llm = LLM(make_model(architecture), kv_recipe="balanced", batch_invariant=True, **options)
    assert not llm.core.looks_ahead, "on a CPU launching waits for the result"
    return llm


def add(core: EngineCore, prompt: list[int], **params: Any) -> Request:
    request = core.request(prompt, SamplingParams(temperature=0, **params))
    core.add(request)
    return request


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("num_pages", [200, 24], ids=["room", "preempting"])
def test_tokens_are_those_of_steps_in_turn(architecture: str, num_pages: int) -> None:
    llm = make_llm(architecture, num_pages=num_pages, max_batched_tokens=32)
    expected = llm.generate(PROMPTS, PARAMS)
    llm.core.looks_ahead = True
    launches = Launches(llm.core)
    assert llm.generate(PROMPTS, PARAMS) == expected
    assert sum(launches.ahead) >= 10
    assert llm.core.tables.allocator.num_used == 0


def test_a_token_that_ends_a_request_is_its_last_one() -> None:
    """The request is computed once more, and that token is dropped."""
    llm = make_llm(num_pages=50)
    prompt, other = PROMPTS[:2]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    free = [output.token_ids for output in llm.generate([prompt, other], params)]
    stop = next(i for i, token in enumerate(free[0]) if token not in free[0][:i] and i > 2)
    llm.core.looks_ahead = True
    launches = Launches(llm.core)
    first = add(llm.core, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[free[0][stop]])
    second = add(llm.core, other, max_tokens=12, ignore_eos=True)
    produced: list[tuple[Request, int]] = []
    with llm.core.runner.attached():
        while llm.core.scheduler.has_work:
            produced += llm.core.step()
            llm.core.check_integrity()
    assert first.output == free[0][: stop + 1] == [x for owner, x in produced if owner is first]
    assert second.output == free[1] == [x for owner, x in produced if owner is second]
    assert launches.ahead == [False] + [True] * 11  # none after the last token by length


def test_a_stop_string_drops_the_token_that_is_on_its_way() -> None:
    llm = LLM(bundled_model_path(), kv_recipe="balanced", batch_invariant=True)
    prompts = ["def __init__(self", "import"]
    params = SamplingParams(max_tokens=24, temperature=0)
    text = llm.generate(prompts[0], params)[0].text
    stopping = SamplingParams(max_tokens=24, temperature=0, stop=(text[8:11],))
    expected = llm.generate(prompts, stopping)
    llm.core.looks_ahead = True
    found = llm.generate(prompts, stopping)
    assert found == expected
    assert found[0].text == text[: text.index(text[8:11])]
    llm.core.check_integrity()


def test_new_requests_join_the_step_after_the_next() -> None:
    core = make_llm(num_pages=50).core
    core.looks_ahead = True
    launches = Launches(core)
    with core.runner.attached():
        first = add(core, PROMPTS[0], max_tokens=9, ignore_eos=True)
        core.step()
        second = add(core, PROMPTS[1], max_tokens=9, ignore_eos=True)
        assert [request for request, _ in core.step()] == [first]
        assert [request for request, _ in core.step()] == [first, second]
    assert launches.ahead == [False, True, False, True]


def test_penalties_need_the_tokens_first() -> None:
    core = make_llm(num_pages=50).core
    core.looks_ahead = True
    launches = Launches(core)
    add(core, PROMPTS[0], max_tokens=5, ignore_eos=True, repetition_penalty=1.2)
    with core.runner.attached():
        while core.scheduler.has_work:
            core.step()
    assert launches.ahead == [False] * 5


def test_no_step_ahead_in_a_pool_without_room() -> None:
    """Four pages: the second request would need a third one, beside two of the first."""
    core = make_llm(num_pages=5, max_model_len=64).core
    core.looks_ahead = True
    launches = Launches(core)
    first = add(core, token_ids(31, seed=1).tolist(), max_tokens=4, ignore_eos=True)
    second = add(core, token_ids(31, seed=2).tolist(), max_tokens=4, ignore_eos=True)
    with core.runner.attached():
        while core.scheduler.has_work:
            core.step()
            core.check_integrity()
    assert len(first.output) == len(second.output) == 4
    assert False in launches.ahead[1:]
    assert core.tables.allocator.num_used == 0


def test_a_step_ahead_of_ended_requests_is_forgotten() -> None:
    llm = make_llm(num_pages=50)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    free = llm.generate([PROMPTS[0]], params)[0].token_ids
    llm.core.looks_ahead = True
    last = next(token for i, token in enumerate(free) if token not in free[:i] and i > 2)
    request = add(llm.core, PROMPTS[0], max_tokens=12, ignore_eos=True, stop_token_ids=[last])
    with llm.core.runner.attached():
        while llm.core.scheduler.has_work:
            llm.core.step()
    assert request.output[-1] == last
    assert llm.core._ahead is None
    assert not llm.core.scheduler._ahead
    assert not llm.core.scheduler._is_open
