"""Long-range retrieval through a cache: codes at all depths, and a repeated segment.

A context holds random token ids, then a text with inserted facts ("The secret code of the amber fox
is 58213."), then the same random ids again, then a question for every fact. Answers are
teacher-forced: a code counts as found if greedy decoding would have generated it. The second
occurrence of the random segment can be predicted only by attention, not by a language prior.

Perplexity depends mostly on nearby tokens; this test shows errors of K over long distances.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.evaluation.caches import MeasuredCache, names_and_scales
from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.layouts import KVCacheDType

_ADJECTIVES = ["amber", "silver", "quiet", "northern", "broken", "golden", "hidden", "ancient"]
_NOUNS = ["fox", "river", "tower", "garden", "engine"]
SEGMENT = 96
"""Tokens of the random segment."""
_FIRST_OF_SEGMENT = 8
"""Tokens of it that are skipped, until the repetition can be recognized."""


@dataclass(frozen=True)
class Context:
    """Tokens of a context, with the positions to evaluate.

    Args:
        ids: of the whole context.
        repeated: positions of the random segment's second occurrence.
        answers: positions of each answer.
    """

    ids: list[int]
    repeated: range
    answers: list[range]


@dataclass(frozen=True)
class RetrievalResult:
    """Results of one format and recipe.

    `codes` of `asked` codes were found completely; `digits` is the share of their tokens that were
    found; `repeated_nll` is the mean negative log-likelihood of the repeated segment's tokens in
    nats, and `repeated_top1` the share of them that were the model's most likely token.
    """

    kv_cache_dtype: str
    kv_recipe: str
    codes: int
    asked: int
    digits: float
    repeated_nll: float
    repeated_top1: float
    contexts: int
    tokens: int


def make_context(tokenizer: Any, text: str, tokens: int, facts: int, seed: int) -> Context:
    """A context of about `tokens` tokens.

    Args:
        tokenizer: of transformers.
        text: filler between the facts; must be long enough.
        facts: number of facts, at most 40, evenly spaced.
        seed: for names, codes and the random segment.

    Raises:
        ValueError: too many facts for the tokens, or too little text.
    """
    rng = random.Random(seed)
    names = [f"{adjective} {noun}" for adjective, noun in product(_ADJECTIVES, _NOUNS)]
    if not 1 <= facts <= len(names):
        raise ValueError(f"facts: expected 1 up to {len(names)}, got {facts}")
    chosen = rng.sample(names, facts)
    codes = {name: "".join(rng.choice("123456789") for _ in range(5)) for name in chosen}

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    told = [encode(f"\nThe secret code of the {name} is {codes[name]}.\n") for name in chosen]
    asked = [
        (encode(f"\nThe secret code of the {name} is "), encode(codes[name]))
        for name in rng.sample(chosen, facts)
    ]
    vocabulary = len(tokenizer)
    segment = [rng.randrange(vocabulary // 50, vocabulary * 4 // 5) for _ in range(SEGMENT)]
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = [*([] if bos is None else [bos]), *segment]
    taken = 2 * SEGMENT + sum(map(len, told)) + sum(len(q) + len(a) for q, a in asked)
    step = (tokens - taken - 1) // facts
    hay = encode(text)
    if step < 1 or len(hay) < step * facts:
        raise ValueError(
            f"tokens: {tokens} for {facts} facts need {max(step, 0) * facts} tokens of text beside "
            f"{taken} of facts and questions; the text has {len(hay)}"
        )
    for i, fact in enumerate(told):
        ids += hay[i * step : (i + 1) * step] + fact
    repeated = range(len(ids), len(ids) + SEGMENT)
    ids += segment
    answers = []
    for question, answer in asked:
        ids += question
        answers.append(range(len(ids), len(ids) + len(answer)))
        ids += answer
    return Context(ids, repeated, answers)


def evaluate_retrieval(
    model: PreTrainedModel,
    contexts: Sequence[Context],
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    chunk_size: int = 512,
    *,
    kv_scales: KVScales | None = None,
    kv_recipes: Sequence[str | KVRecipe] | None = None,
    tokenizer: object = None,
    attention_backend: str | None = None,
) -> list[RetrievalResult]:
    """Measure formats and recipes on contexts with their packed caches.

    Args:
        model: a transformers model of a supported architecture.
        contexts: `make_context`'s.
        kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, attention_backend: as for
            `evaluate_perplexity`.
        chunk_size: tokens per step.

    Raises:
        ValueError: no context, one longer than the model's, or as `evaluate_perplexity`.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    longest = max((len(context.ids) for context in contexts), default=0)
    limit = getattr(model.config, "max_position_embeddings", 2**31)
    if not 0 < longest <= limit:
        raise ValueError(f"contexts: expected 1 up to {limit} tokens, got {longest}")
    names, scales = names_and_scales(
        model, kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, attention_backend
    )
    results = []
    for name in names:
        cache = MeasuredCache(
            model, name, scales[name], longest, attention_backend=attention_backend
        )
        with cache.runner.attached():
            found = [_measure(cache, seq, c, chunk_size) for seq, c in enumerate(contexts)]
        asked = sum(len(context.answers) for context in contexts)
        codes, hits, digits, nll, top1 = (sum(column) for column in zip(*found, strict=True))
        results.append(
            RetrievalResult(
                kv_cache_dtype=name.dtype.value,
                kv_recipe=name.recipe.name,
                codes=int(codes),
                asked=asked,
                digits=hits / digits,
                repeated_nll=nll / len(contexts),
                repeated_top1=top1 / len(contexts),
                contexts=len(contexts),
                tokens=sum(len(context.ids) for context in contexts),
            )
        )
    return results


def _measure(
    cache: MeasuredCache, seq: int, context: Context, chunk_size: int
) -> tuple[int, int, int, float, float]:
    """Codes found, answer tokens found and total, NLL and top-1 of the repeated segment."""
    cache.tables.add(seq)
    targets = torch.tensor(context.ids[1:], device="cpu")
    right, log_p = [], []
    for begin in range(0, len(context.ids), chunk_size):
        ids = context.ids[begin : begin + chunk_size]
        rows = cache.log_probabilities([(seq, ids)])[: len(context.ids) - 1 - begin].cpu()
        expected = targets[begin : begin + len(rows)]
        right.append(rows.argmax(-1) == expected)
        log_p.append(rows[torch.arange(len(rows), device="cpu"), expected])
    cache.tables.free(seq)
    hits, logs = torch.cat(right), torch.cat(log_p)  # index i: token i + 1
    answers = [hits[answer.start - 1 : answer.stop - 1] for answer in context.answers]
    known = slice(context.repeated.start + _FIRST_OF_SEGMENT - 1, context.repeated.stop - 1)
    return (
        sum(bool(answer.all()) for answer in answers),
        sum(int(answer.sum()) for answer in answers),
        sum(map(len, answers)),
        -float(logs[known].mean()),
        float(hits[known].float().mean()),
    )
