from collections import Counter

import numpy as np
import pytest
import torch

from halfbyte.assets import bundled_model_path
from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.engine.request import Request
from halfbyte.engine.sampler import Sampler
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.models import load_tokenizer

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])


def draw(params: SamplingParams, count: int) -> Counter[int]:
    sampler, request = Sampler(), Request(0, [1], params)
    return Counter(sampler.sample(request, LOGITS) for _ in range(count))


def test_sampler_greedy() -> None:
    assert draw(SamplingParams(temperature=0), 5) == {0: 5}


def test_sampler_follows_the_distribution() -> None:
    counts = draw(SamplingParams(temperature=1.0, seed=0), 4000)
    frequencies = torch.tensor([counts[i] / 4000 for i in range(5)])
    torch.testing.assert_close(frequencies, LOGITS.softmax(0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.95}, {0, 1, 2}),
    ],
    ids=str,
)
def test_sampler_cuts(params: dict, allowed: set[int]) -> None:
    # Probabilities are 0.644, 0.237, 0.087 and 0.032.
    assert set(draw(SamplingParams(temperature=1.0, seed=1, **params), 400)) == allowed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k: expected at least 1, or 0 or -1 for all, got -2"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": [1]}, r"stop: expected texts, got \[1\]"),
        ({"stop_token_ids": 5}, "stop_token_ids: expected a list, got 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected an integer, got 'a'"),
        ({"max_tokens": "5"}, "max_tokens: expected an integer, got '5'"),
        ({"max_tokens": 2.5}, "max_tokens: expected an integer, got 2.5"),
        ({"temperature": "0"}, "temperature: expected a number >= 0, got '0'"),
        ({"top_k": 1.5}, "top_k: expected an integer, got 1.5"),
        ({"seed": 1.5}, "seed: expected an integer, got 1.5"),
    ],
    ids=str,
)
def test_sampling_params_refuse(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_sampling_params_of_other_kinds() -> None:
    """As vLLM's users have them."""
    params = SamplingParams(stop=None, stop_token_ids=None, top_k=np.int64(3))  # type: ignore[arg-type]
    assert params == SamplingParams(top_k=3)
    params = SamplingParams(stop_token_ids=np.array([1, 2]), stop=np.array(["a"]))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a",), (1, 2))
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]


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
    assert max(seen) <= 8


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
