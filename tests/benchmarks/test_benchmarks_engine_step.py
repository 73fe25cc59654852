"""The benchmark of the engine's steps on a CPU with a tiny model, and its bounds."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import check, engine_step
from benchmarks.bounds import engine
from benchmarks.engine_step import Case
from halfbyte import LLM, SamplingParams

CASES = (
    Case("3x40 greedy", 3, 40, {"temperature": 0.0}),
    Case("2x70 top_p, seed, logprobs", 2, 70, {"top_p": 0.9, "seed": 1, "logprobs": 2}),
)


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return engine_step.make_model(config, torch.device("cpu"))


def test_every_case_is_measured_in_every_engine(model: Any) -> None:
    tokenizer = engine_step.make_tokenizer(512)
    report = engine_step.run(model, tokenizer, CASES, steps=5)
    assert list(report["results"]) == ["plain", "balanced"]
    for variants in report["results"].values():
        assert list(variants) == list(engine_step.VARIANTS)
        for row in variants.values():
            for case in CASES:
                found = row[case.name]
                assert 0 < found["step_ms"] <= found["max_ms"]
                # Prompt, the first token, the warm-up, and half of the steps.
                assert case.context + 4 < found["mean_tokens"] < case.context + 4 + 5 + case.batch
    assert len(engine_step.table(report).rows) == len(CASES) + 1


def test_a_step_is_timed_from_token_to_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model, kv_cache_dtype="nvfp4", kv_recipe="plain", max_num_seqs=3, max_model_len=256)
    steps = llm.core.step
    counted = []

    def step() -> Any:
        produced = steps()
        counted.append(len(produced))
        return produced

    monkeypatch.setattr(llm.core, "step", step)
    times = list(engine_step.step_times(llm, CASES[0], 5))
    assert len(times) == 5
    # One prefill step; then only steps that count, and those of the warm-up.
    assert counted == [3] * (1 + engine_step._WARM_UPS + 5)
    assert not llm.core.scheduler.has_work


def test_tokens_have_text_in_the_tokenizer_s_whole_vocabulary() -> None:
    tokenizer = engine_step.make_tokenizer(1000)
    assert tokenizer.decode(tokenizer("a b").input_ids) == "a b"
    assert tokenizer.decode([999]) == " w3e7"
    assert len(tokenizer) == 1000


def report(step: float, sampled: float, single: float) -> dict[str, Any]:
    rows = {
        "64x1024 greedy": {"step_ms": step},
        "64x1024 default": {"step_ms": sampled},
        "1x2048 greedy": {"step_ms": single},
    }
    return {"results": {"plain": {"eager": {}, "compiled": rows}}}


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        ((8.0, 8.4, 3.0), set()),
        ((8.1, 8.1, 3.0), {"plain, 64x1024 greedy, ms"}),
        ((7.0, 7.4, 3.0), {"plain, 64x1024 default, of greedy"}),
        ((7.0, 7.0, 3.1), {"plain, 1x2048 greedy, ms"}),
    ],
)
def test_slower_steps_are_found(times: tuple[float, float, float], missed: set[str]) -> None:
    bounds = list(engine.of_steps(report(*times)))
    assert len(bounds) == 3
    assert {bound.name for bound in check.broken(bounds)} == missed


def test_the_bounds_are_of_cases_that_are_measured() -> None:
    names = {case.name for case in engine_step.CASES}
    assert {*engine._MAX_MS, "64x1024 default"} <= names
    assert SamplingParams(**engine_step.CASES[1].sampling) == SamplingParams()
