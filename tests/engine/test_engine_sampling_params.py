import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from halfbyte.engine.sampling_params import SamplingParams


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


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("max_tokens", [None, 1], [0]),
        ("temperature", [0, 1e-6], [-1e-6]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
        ("top_k", [-1, 0, 1], [-2]),
        ("top_p", [1e-6, 1], [0, 1 + 1e-6]),
        ("n", [1, 2], [0]),
        ("min_p", [0, 1], [-1e-6, 1 + 1e-6]),
        ("repetition_penalty", [1e-6], [0, -1e-6]),
        ("presence_penalty", [-2, 2], [-2 - 1e-6, 2 + 1e-6]),
        ("frequency_penalty", [-2, 2], [-2 - 1e-6, 2 + 1e-6]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("logprobs", [None, -1, 0], [-2]),
    ],
)
def test_ranges_of_sampling_params_to_their_ends(
    name: str, valid: list[Any], invalid: list[Any]
) -> None:
    for value in valid:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in invalid:
        with pytest.raises(ValueError, match=f"{name}: expected .*, got {value}"):
            SamplingParams(**{name: value})
    assert SamplingParams(max_tokens=None, min_tokens=17).min_tokens == 17
    assert SamplingParams(n=2, temperature=1e-6).n == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0, "top_p": 0.5, "min_tokens": 3, "logprobs": 2}, False),
        *[({name: 1.5}, True) for name in ("repetition_penalty", "presence_penalty")],
        *[({name: -0.5}, True) for name in ("frequency_penalty", "presence_penalty")],
    ],
)
def test_penalties_are_noticed(fields: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**fields).has_penalties == expected


def test_sampling_params_of_other_kinds() -> None:
    """As vLLM's users have them."""
    params = SamplingParams(stop=None, stop_token_ids=None, top_k=np.int64(3))  # type: ignore[arg-type]
    assert params == SamplingParams(top_k=3)
    params = SamplingParams(stop_token_ids=np.array([1, 2]), stop=np.array(["a"]))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a",), (1, 2))
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"n": 2, "temperature": 0}, "n: expected 1 where temperature is 0, got 2"),
        ({"min_p": 1.1}, r"min_p: expected a number in \[0, 1\], got 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0, got 0.0"),
        ({"presence_penalty": 2.1}, r"presence_penalty: expected a number in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -3}, r"frequency_penalty: expected a number in \[-2, 2\], got -3.0"),
        ({"min_tokens": -1}, "min_tokens: expected a number >= 0, got -1"),
        ({"min_tokens": 17}, r"min_tokens: expected at most max_tokens \(16\), got 17"),
        ({"logprobs": -2}, "logprobs: expected a number >= 0, or -1, got -2"),
        ({"logprobs": "5"}, "logprobs: expected an integer, got '5'"),
    ],
    ids=str,
)
def test_sampling_params_refuse_further_fields(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", ["logit_bias", "best_of", "bad_words", "structured_outputs"])
def test_sampling_params_that_only_vllm_has_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: not supported by halfbyte.LLM"):
        SamplingParams(**{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_sampling_params_are_copied_and_replaced() -> None:
    params = SamplingParams(max_tokens=None, seed=5)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3) == SamplingParams(max_tokens=None, seed=5, n=3)
