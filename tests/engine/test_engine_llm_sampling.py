"""Sampling parameters in whole generations."""

import math

import pytest
import torch

from halfbyte.engine import LLM, FinishReason, SamplingParams
from models.zoo import make_model, token_ids

PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(make_model("llama"), kv_cache_dtype="float32")


def test_completions_of_a_prompt_are_those_of_neighbouring_seeds(llm: LLM) -> None:
    three = SamplingParams(max_tokens=9, seed=5, n=3)
    output, other = llm.generate(PROMPTS[:2], [three, SamplingParams(max_tokens=9, seed=2)])
    alone = [
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, seed=seed))[0] for seed in (5, 6, 7)
    ]
    assert [x.token_ids for x in output.outputs] == [x.token_ids for x in alone]
    assert [x.index for x in output.outputs] == [0, 1, 2]
    assert output.token_ids == output.outputs[0].token_ids
    assert len({tuple(x.token_ids) for x in output.outputs}) == 3
    assert len(other.outputs) == 1
    streamed: dict[tuple[int, int], list[int]] = {}
    for token in llm.stream(PROMPTS[:2], [three, SamplingParams(max_tokens=9, seed=2)]):
        streamed.setdefault((token.index, token.completion), []).append(token.token)
    assert streamed == {
        **{(0, i): x.token_ids for i, x in enumerate(output.outputs)},
        (1, 0): other.token_ids,
    }


def test_max_tokens_none_goes_to_the_end_of_the_context() -> None:
    llm = LLM(make_model("llama"), kv_cache_dtype="nvfp4", max_model_len=64)
    output = llm.generate(PROMPTS[1], SamplingParams(max_tokens=None, temperature=0))[0]
    assert len(output.token_ids) == 64 - 33
    assert output.finish_reason is FinishReason.LENGTH


def test_repetition_penalty_gives_the_tokens_of_transformers(llm: LLM) -> None:
    model = make_model("llama")
    for prompt in PROMPTS:
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.4
        )[0, len(prompt) :]
        params = SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.4)
        assert llm.generate(prompt, params)[0].token_ids == expected.tolist()


def test_penalties_survive_preemption() -> None:
    params = SamplingParams(
        max_tokens=20, seed=1, repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=1.0
    )
    roomy = LLM(make_model("llama"), kv_cache_dtype="float32", num_pages=100)
    tight = LLM(make_model("llama"), kv_cache_dtype="float32", num_pages=8)
    assert tight.generate(PROMPTS, params) == roomy.generate(PROMPTS, params)


def test_min_tokens_delays_the_end(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0))[0].token_ids
    stop = (free[2],)
    at_once = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=stop)
    assert len(llm.generate(PROMPTS[0], at_once)[0].token_ids) == 1 + free.index(free[2])
    later = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=stop, min_tokens=8)
    tokens = llm.generate(PROMPTS[0], later)[0].token_ids
    assert len(tokens) >= 8
    assert stop[0] not in tokens[:8]
    # Outside the vocabulary: never generated, and no error.
    wide = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(10**9, -1), min_tokens=2)
    assert len(llm.generate(PROMPTS[0], wide)[0].token_ids) == 3


def test_logprobs_are_the_model_s(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2)
    output, without = llm.generate(PROMPTS[:2], [params, SamplingParams(max_tokens=6)])
    assert without.logprobs is None
    assert output.logprobs is not None
    model = make_model("llama")
    ids = torch.tensor([PROMPTS[0] + output.token_ids])
    with torch.no_grad():
        expected = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    for token, at, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        assert next(iter(at)) == token
        assert set(row.topk(2).indices.tolist()) <= set(at)
        assert len(at) in (2, 3)
        for one, logprob in at.items():
            assert math.isclose(logprob.logprob, float(row[one]), abs_tol=2e-3)
            assert logprob.rank == 1 + int((row > row[one]).sum())
            assert logprob.decoded_token is None
