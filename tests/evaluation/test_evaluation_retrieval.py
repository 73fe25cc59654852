"""Facts and a repeated segment in a context, through the cache."""

from typing import Any

import pytest
import torch

from halfbyte import load_model
from halfbyte.assets import bundled_model_path, heldout_texts
from halfbyte.evaluation import evaluate_retrieval, make_context
from halfbyte.evaluation.retrieval import SEGMENT
from halfbyte.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(bundled_model_path())


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(heldout_texts().values())


def test_contexts_have_the_requested_length_and_answers(tokenizer: Any, text: str) -> None:
    context = make_context(tokenizer, text, 1500, 4, seed=3)
    assert 1450 < len(context.ids) <= 1500
    assert len(context.repeated) == SEGMENT
    start = 0 if tokenizer.bos_token_id is None else 1
    repeated = [context.ids[i] for i in context.repeated]
    assert repeated == context.ids[start : start + SEGMENT]
    assert len(context.answers) == 4
    whole = tokenizer.decode(context.ids[: context.repeated.start])
    for answer in context.answers:
        code = tokenizer.decode([context.ids[i] for i in answer])
        assert len(code) == 5
        assert code.isdigit()
        question = tokenizer.decode(context.ids[answer.start - 30 : answer.stop])
        fact = question[question.rindex("The secret code of") :]
        assert f"{fact}." in whole
    assert make_context(tokenizer, text, 1500, 4, seed=4).ids != context.ids
    assert make_context(tokenizer, text, 1500, 4, seed=3) == context


@pytest.mark.parametrize(
    ("tokens", "facts", "message"),
    [(300, 9, "tokens: 300 for 9 facts"), (900, 41, "facts: expected 1 up to 40, got 41")],
)
def test_contexts_that_cannot_be(
    tokenizer: Any, text: str, tokens: int, facts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_context(tokenizer, text, tokens, facts, seed=1)


def test_what_is_counted(tokenizer: Any, text: str) -> None:
    """Counts equal those of the model without a cache, for any chunk size."""
    model = load_model(bundled_model_path(), dtype="float32")
    context = make_context(tokenizer, text, 700, 2, seed=5)
    with torch.inference_mode():
        log_p = model(torch.tensor([context.ids])).logits[0].log_softmax(-1)
    known = list(context.repeated)[8:]
    nll = -sum(float(log_p[i - 1, context.ids[i]]) for i in known) / len(known)
    hits = [int(log_p[i - 1].argmax()) == context.ids[i] for a in context.answers for i in a]
    found = {}
    for chunk in (64, 700):
        exact, packed = evaluate_retrieval(
            model, [context], ["float32", "nvfp4"], chunk, tokenizer=tokenizer
        )
        assert exact.repeated_nll == pytest.approx(nll, rel=1e-4)
        assert exact.digits == pytest.approx(sum(hits) / len(hits))
        assert (exact.asked, exact.contexts, exact.tokens) == (2, 1, len(context.ids))
        assert packed.repeated_nll != exact.repeated_nll
        found[chunk] = packed.repeated_nll
    assert found[64] == pytest.approx(found[700], rel=1e-3)
    with pytest.raises(ValueError, match="contexts: expected 1 up to"):
        evaluate_retrieval(model, [], ["nvfp4"])
