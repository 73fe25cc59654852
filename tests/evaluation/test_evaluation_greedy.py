"""Greedy continuations with caches of several formats, compared with a bfloat16 cache."""

import pytest

from halfbyte import LLM, SamplingParams
from halfbyte.evaluation import evaluate_greedy
from models.zoo import make_model, token_ids

PROMPTS = [token_ids(1, n, seed=n)[0].tolist() for n in (5, 40, 80)]
TOKENS = 24


def continuations(kv_cache_dtype: str, kv_recipe: str) -> list[list[int]]:
    """Greedy tokens by halfbyte's engine."""
    llm = LLM(make_model("llama"), kv_cache_dtype=kv_cache_dtype, kv_recipe=kv_recipe, num_pages=64)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("chunk_size", [512, 7])
def test_agreement_is_that_of_the_engine_s_tokens(chunk_size: int) -> None:
    formats = ["bfloat16", "nvfp4", "fp8"]
    recipes = ["plain", "balanced"]
    results = evaluate_greedy(
        make_model("llama"), PROMPTS, TOKENS, formats, chunk_size, kv_recipes=recipes
    )
    names = [(result.kv_cache_dtype, result.kv_recipe) for result in results]
    assert names == [
        ("bfloat16", "plain"),
        ("nvfp4", "plain"),
        ("nvfp4", "balanced"),
        ("fp8_e4m3", "plain"),
    ]
    expected = continuations("bfloat16", "plain")
    for result in results:
        found = continuations(result.kv_cache_dtype, result.kv_recipe)
        shared = [
            next((i for i in range(TOKENS) if a[i] != b[i]), TOKENS)
            for a, b in zip(found, expected, strict=True)
        ]
        assert result.agreed == pytest.approx(sum(shared) / len(PROMPTS))
        assert result.whole == shared.count(TOKENS)
        assert (result.prompts, result.new_tokens) == (len(PROMPTS), TOKENS)
    assert (results[0].agreed, results[0].agreed_stderr) == (TOKENS, 0)
    assert results[1].agreed < TOKENS  # four bits show, so the cache was read


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "chunk_size", "message"),
    [
        ([], 4, 8, "prompts: expected one or more"),
        ([[]], 4, 8, r"prompts: expected one or more of 1 to \d+ tokens, got \[0\]"),
        ([[1] * 10**6], 4, 8, "prompts: expected one or more of 1 to"),
        ([[1]], 0, 8, "new_tokens: expected at least 1, got 0"),
        ([[1]], 1, 0, "chunk_size: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured(
    prompts: list[list[int]], new_tokens: int, chunk_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_greedy(make_model("llama"), prompts, new_tokens, ["nvfp4"], chunk_size)
