"""Incremental detokenization equals decoding all ids at once, at a constant cost per token."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine.tokenizers_zoo import byte_level, sentencepiece
from halfbyte.assets import bundled_model_path
from halfbyte.engine import LLM, FinishReason, SamplingParams
from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.models import load_tokenizer
from models.zoo import make_model


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Bytes(), stop)
    out = []
    for byte in text.encode():
        out.append(detokenizer.push(byte))
        if detokenizer.stopped:
            return out, detokenizer
    out.append(detokenizer.finish())
    return out, detokenizer


def test_detokenizer_holds_back_half_characters() -> None:
    out, _ = pieces("a€b")
    assert out == ["a", "", "", "€", "b", ""]


def test_detokenizer_gives_back_an_incomplete_end() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push("€".encode()[0]) == ""
    assert detokenizer.finish() == "�"


def test_detokenizer_decodes_few_ids_per_token() -> None:
    seen = []

    class Counting(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            seen.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Counting(), ("END",))
    text = "x = 'é€😀'  # " * 50
    assert "".join(map(detokenizer.push, text.encode())) + detokenizer.finish() == text
    assert max(seen) <= 13


@pytest.mark.parametrize("text", ["def f(x):\n    return '日本語 😀'\n\n", "  a\tb  c\n"])
def test_detokenizer_gives_the_text_of_all_ids(text: str) -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    ids = tokenizer(text * 3).input_ids
    detokenizer = Detokenizer(tokenizer)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("ababac!", ("abac",), "ab"),
        ("x\n\ny", ("\n\n", "y"), "x"),
        ("tail EN", ("END",), "tail EN"),
    ],
    ids=["cut", "not-quite", "overlapping", "first-of-two", "held-back-at-the-end"],
)
def test_detokenizer_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    out, detokenizer = pieces(text, stop)
    assert "".join(out) == expected == detokenizer.text


KINDS = {"sentencepiece": sentencepiece, "byte_level": byte_level}
TEXT = "the cat sat on a mat. € 日本語 😀, the cat"


@pytest.mark.parametrize("kind", KINDS)
def test_detokenizer_goes_on_from_the_prompt(kind: str) -> None:
    """Prompt plus text is the text of all ids, also if the prompt splits a character."""
    tokenizer = KINDS[kind]()
    ids = tokenizer(TEXT * 3).input_ids
    expected = tokenizer.decode(ids)
    for split in range(len(ids)):
        before = tokenizer.decode(ids[:split])
        if before.endswith("�"):
            continue
        detokenizer = Detokenizer(tokenizer, prompt=ids[:split])
        text = "".join(map(detokenizer.push, ids[split:])) + detokenizer.finish()
        assert before + text == expected
        assert detokenizer.text == text


def test_detokenizer_keeps_the_space_of_the_first_word() -> None:
    tokenizer = sentencepiece()
    prompt, output = (tokenizer.convert_tokens_to_ids(x.split()) for x in ("▁the ▁cat", "▁sat ▁on"))
    detokenizer = Detokenizer(tokenizer, prompt=prompt)
    assert [detokenizer.push(token) for token in output] == [" sat", " on"]
    # Nothing before: the decoder's own rule.
    assert Detokenizer(tokenizer).push(output[0]) == "sat"
    assert Detokenizer(tokenizer, prompt=[0]).push(output[0]) == "sat"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_detokenizer_half_characters_and_specials_in_any_order(kind: str, seed: int) -> None:
    """Characters come out whole, with special tokens anywhere between their bytes."""
    tokenizer, rng = KINDS[kind](), random.Random(seed)
    ids: list[int] = []
    for token in tokenizer("".join(rng.choice("a€😀 .日sat") for _ in range(60))).input_ids:
        ids += [token, *([rng.randrange(3)] * rng.choice([0, 0, 0, 1, 40]))]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


class Counting:
    """Counts the ids that a tokenizer is given to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.count += len(ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer of transformers with a `decode` of its own."""

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super().decode(*args, **kwargs)).upper()


def test_detokenizer_uses_a_tokenizer_s_own_decode() -> None:
    tokenizer = Shouting(tokenizer_object=byte_level().backend_tokenizer)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.push, tokenizer("cat").input_ids)) + detokenizer.finish()
    assert text == "CAT"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["open bytes", "specials", "specials after an open byte", "text"])
def test_detokenizer_costs_the_same_for_every_token(kind: str, what: str) -> None:
    tokenizer = KINDS[kind]()
    first = tokenizer("€").input_ids[0 if kind == "byte_level" else 1]
    sequences = {
        "open bytes": [first] * 500,
        "specials": [1] * 500,
        "specials after an open byte": [first, *[1] * 499],
        "text": (tokenizer(TEXT).input_ids * 100)[:500],
    }
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting, ("never",))
    for token in sequences[what]:
        detokenizer.push(token)
    assert counting.count <= 20 * 500
    if what == "open bytes":  # not held back for ever
        assert len(detokenizer.text) >= 490


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("<|im_end|>",), "the cat"),
        (("<|im_end|> sat",), "the cat"),
        (("cat<|im_end|>",), "the "),
        (("cat sat",), "the "),  # special tokens are not in the text
        (("<|im_end|>x",), "the cat sat on"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_may_be_special_tokens(
    kind: str, stop: tuple[str, ...], expected: str
) -> None:
    tokenizer = KINDS[kind]()
    ids = [*tokenizer("the cat").input_ids, 2, *tokenizer(" sat on").input_ids]
    if kind == "sentencepiece":
        ids = tokenizer.convert_tokens_to_ids(["▁the", "▁cat", "<|im_end|>", "▁sat", "▁on"])
    detokenizer = Detokenizer(tokenizer, stop)
    given = ""
    for token in ids:
        given += detokenizer.push(token)
        if detokenizer.stopped:
            break
    given += detokenizer.finish()
    assert given == detokenizer.text == expected
    assert detokenizer.stopped == (expected != "the cat sat on")


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = Detokenizer(Bytes(), ("b",), min_tokens=3)
    assert "".join(map(detokenizer.push, b"abab")) == "aba"
    assert detokenizer.stopped


def test_llm_text_follows_its_prompt() -> None:
    tokenizer = sentencepiece()
    model = make_model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight[: 3 + 256] = 0  # so that words come, of whose logits one is positive
    llm = LLM(model, tokenizer, kv_cache_dtype="float32")
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    for prompt in ("the cat", "on a", ""):
        ids = tokenizer(prompt).input_ids or [0]
        output = llm.generate(prompt or [ids], params)[0]
        assert prompt + output.text == tokenizer.decode(
            [*ids, *output.token_ids], skip_special_tokens=True
        )
        assert output.logprobs is not None
        (logprob,) = output.logprobs[0].values()
        assert logprob.decoded_token == tokenizer.decode([output.token_ids[0]])


def test_llm_stops_at_the_tokenizer_s_eos_beside_the_model_s() -> None:
    tokenizer = sentencepiece()
    model = make_model("llama", vocab_size=len(tokenizer))
    free = LLM(model, kv_cache_dtype="float32").generate(
        [5, 6, 7], SamplingParams(max_tokens=9, temperature=0)
    )[0]
    at = next(i for i, token in enumerate(free.token_ids) if i and token not in free.token_ids[:i])
    model.generation_config.eos_token_id = free.token_ids[8]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free.token_ids[at])
    llm = LLM(model, tokenizer, kv_cache_dtype="float32")
    greedy = SamplingParams(max_tokens=9, temperature=0)
    output = llm.generate([[5, 6, 7]], greedy)[0]
    assert output.token_ids == free.token_ids[: at + 1]
    assert output.finish_reason is FinishReason.STOP
    model.generation_config.eos_token_id = free.token_ids[0]
    output = LLM(model, tokenizer, kv_cache_dtype="float32").generate([[5, 6, 7]], greedy)[0]
    assert output.token_ids == free.token_ids[:1]
