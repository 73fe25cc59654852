"""Number of greedy tokens that agree with those of a bfloat16 cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from halfbyte.evaluation.caches import CacheName, MeasuredCache, names_and_scales
from halfbyte.evaluation.perplexity import BASELINE
from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.layouts import KVCacheDType


@dataclass(frozen=True)
class GreedyResult:
    """Results of one format and recipe.

    `agreed` is the mean number of tokens, out of `new_tokens`, before the first difference;
    `agreed_stderr` is its standard error over prompts, None for one prompt; `whole` is the number
    of `prompts` whose tokens all agree.
    """

    kv_cache_dtype: str
    kv_recipe: str
    agreed: float
    agreed_stderr: float | None
    whole: int
    prompts: int
    new_tokens: int


def evaluate_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    chunk_size: int = 512,
    *,
    kv_scales: KVScales | None = None,
    kv_recipes: Sequence[str | KVRecipe] | None = None,
    tokenizer: object = None,
    attention_backend: str | None = None,
) -> list[GreedyResult]:
    """Measure formats and recipes on continuations of prompts; stop tokens are ignored.

    Args:
        model: a transformers model of a supported architecture.
        prompts: token ids.
        new_tokens: tokens to generate per prompt.
        kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, attention_backend: as for
            `evaluate_perplexity`.
        chunk_size: prompt tokens per step.

    Raises:
        ValueError: no prompts, an empty prompt or one that does not fit the model's context, fewer
            than one new token, or as `evaluate_perplexity`.
    """
    for argument, number in (("new_tokens", new_tokens), ("chunk_size", chunk_size)):
        if number < 1:
            raise ValueError(f"{argument}: expected at least 1, got {number}")
    lengths = [len(prompt) for prompt in prompts]
    limit = getattr(model.config, "max_position_embeddings", 2**31) - new_tokens
    if not lengths or not 0 < min(lengths) <= max(lengths) <= limit:
        raise ValueError(f"prompts: expected one or more of 1 to {limit} tokens, got {lengths}")
    names, scales = names_and_scales(
        model, kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, attention_backend
    )
    longest = max(lengths) + new_tokens

    def cache_of(name: CacheName) -> MeasuredCache:
        return MeasuredCache(
            model,
            name,
            scales.get(name),  # the baseline needs none
            longest,
            len(prompts),
            attention_backend=attention_backend,
        )

    baseline = cache_of(CacheName(BASELINE, KVRecipe()))
    expected = _continue(baseline, prompts, new_tokens, chunk_size)
    results = []
    for name in names:
        found = _continue(cache_of(name), prompts, new_tokens, chunk_size, expected)
        pairs = zip(found, expected, strict=True)
        agreed = torch.tensor([_shared(*pair) for pair in pairs], dtype=torch.float64, device="cpu")
        results.append(
            GreedyResult(
                kv_cache_dtype=name.dtype.value,
                kv_recipe=name.recipe.name,
                agreed=float(agreed.mean()),
                agreed_stderr=float(agreed.std() / n**0.5) if (n := len(prompts)) > 1 else None,
                whole=int((agreed == new_tokens).sum()),
                prompts=len(prompts),
                new_tokens=new_tokens,
            )
        )
    return results


def _continue(
    cache: MeasuredCache,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    chunk_size: int,
    expected: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Greedy continuations, up to the first token that differs from the expected one."""
    written: list[list[int]] = []
    with cache.runner.attached():
        for seq, prompt in enumerate(prompts):
            cache.tables.add(seq)
            for begin in range(0, len(prompt), chunk_size):
                rows = cache.log_probabilities([(seq, list(prompt[begin : begin + chunk_size]))])
            written.append([int(rows[-1].argmax())])
        for _ in range(new_tokens - 1):
            running = [
                seq
                for seq, tokens in enumerate(written)
                if expected is None or tokens[-1] == expected[seq][len(tokens) - 1]
            ]
            if not running:
                break
            rows = cache.log_probabilities([(seq, written[seq][-1:]) for seq in running])
            for seq, row in zip(running, rows, strict=True):
                written[seq].append(int(row.argmax()))
    return written


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
