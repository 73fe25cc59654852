"""`halfbyte.Cache` in transformers' `generate()`."""

from typing import Any

import pytest
import torch

from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.models import Cache
from models.test_models_cache import padded_batch
from models.zoo import ARCHITECTURES, make_model, token_ids
from slow import slow


def generate(model: Any, cache: Cache | None, **options: object) -> torch.Tensor:
    """Greedy generation on a left-padded batch, through our cache or transformers' own."""
    ids, mask, _ = padded_batch()
    if cache is None:
        model.set_attn_implementation("eager")
    else:
        options["past_key_values"] = cache
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **options
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_left_padded_batch(architecture: str) -> None:
    model = make_model(architecture)
    expected = generate(model, None)
    assert torch.equal(generate(model, Cache(model, "float32")), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_generate_beam_search(architecture: str) -> None:
    model = make_model(architecture)
    expected = generate(model, None, num_beams=3)
    cache = Cache(model, "float32")
    assert torch.equal(generate(model, cache, num_beams=3), expected)
    cache.tables.check_integrity()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_generate_prompt_lookup_crops(architecture: str) -> None:
    model = make_model(architecture)
    model.set_attn_implementation("eager")
    # A prompt that repeats itself, so that candidates are found, and mostly rejected.
    ids = token_ids(1, 8).repeat(1, 4)
    plain = model.generate(input_ids=ids, max_new_tokens=30, do_sample=False)
    cache = Cache(model, "float32")
    looked_up = model.generate(
        input_ids=ids,
        max_new_tokens=30,
        do_sample=False,
        prompt_lookup_num_tokens=4,
        past_key_values=cache,
    )
    assert torch.equal(looked_up, plain)
    cache.tables.check_integrity()


@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        name if name in {"bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"} else slow(name)
        for name in KV_CACHE_QUANT_REGISTRY
    ],
)
def test_generate_every_dtype_in_a_batch_as_alone(kv_cache_dtype: str) -> None:
    model = make_model("qwen3")
    ids, mask, _ = padded_batch()
    together = generate(model, Cache(model, kv_cache_dtype))
    for row in range(3):
        alone = model.generate(
            input_ids=ids[row][mask[row].bool()][None],
            max_new_tokens=24,
            do_sample=False,
            past_key_values=Cache(model, kv_cache_dtype),
        )
        assert torch.equal(alone[0, -24:], together[row, -24:])


def test_cache_continues_a_conversation() -> None:
    model = make_model("llama")
    first = token_ids(1, 20)
    cache = Cache(model, "nvfp4")
    once = model.generate(
        input_ids=first, max_new_tokens=10, do_sample=False, past_key_values=cache
    )
    more = torch.cat([once, token_ids(1, 5, seed=9)], 1)
    continued = model.generate(
        input_ids=more, max_new_tokens=10, do_sample=False, past_key_values=cache
    )
    anew = model.generate(
        input_ids=more, max_new_tokens=10, do_sample=False, past_key_values=Cache(model, "nvfp4")
    )
    assert torch.equal(continued, anew)
