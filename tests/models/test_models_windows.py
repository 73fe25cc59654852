"""Sliding windows of a config: those that an architecture's code in transformers applies."""

from typing import Any

import pytest
import torch

from halfbyte import Cache
from halfbyte.engine import LLM, SamplingParams
from halfbyte.models.architectures import UnsupportedModelError
from models.zoo import ARCHITECTURES, make_model, token_ids

SHORT: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_windows_are_those_of_the_model(architecture: str) -> None:
    model = make_model(architecture, **SHORT)
    ids = token_ids(1, 60, seed=3)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
    if architecture == "qwen2_moe":
        for make in (Cache, LLM):
            with pytest.raises(UnsupportedModelError, match="sliding windows of qwen2_moe are not"):
                make(model)
        return
    with torch.no_grad():
        found = model(ids, past_key_values=Cache(model, "float32")).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    llm = LLM(model, kv_cache_dtype="float32", num_pages=20)
    params = SamplingParams(max_tokens=1, temperature=0)
    assert llm.generate(ids[0].tolist(), params)[0].token_ids == [int(expected.argmax())]


def test_qwen2_moe_without_windows_runs() -> None:
    llm = LLM(make_model("qwen2_moe", sliding_window=8, use_sliding_window=False))
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2))[0].error is None
