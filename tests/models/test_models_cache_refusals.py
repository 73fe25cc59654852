"""What `halfbyte.Cache` refuses: formats, backends, models, masks and derivatives."""

import pytest
import torch

from halfbyte.dispatch import NoImplementationError
from halfbyte.models import Cache, UnsupportedModelError
from models.test_models_cache import feed
from models.zoo import make_model, token_ids


@pytest.mark.parametrize(
    ("kv_cache_dtype", "message"),
    [
        ("nonsense", "unknown 'nonsense'"),
        ("mxfp4", "multiple of 32, got 16"),
        (["nvfp4"] * 3, "3 formats for 4 layers"),
        ({"full_attention": "nvfp4"}, r"missing \['sliding_attention'\]"),
        (None, "expected a format or formats, got None"),
        (3, "expected a format or formats, got 3"),
    ],
    ids=["unknown", "indivisible", "too-few", "missing-kind", "none", "number"],
)
def test_cache_refuses_formats(kv_cache_dtype: object, message: str) -> None:
    model = make_model("mistral")
    with pytest.raises(ValueError, match=message):
        Cache(model, kv_cache_dtype)  # type: ignore[arg-type]


def test_cache_refuses_backends_before_anything_runs() -> None:
    model = make_model("llama")
    for name, message in (("zz", "unknown 'zz'"), ("cuda", "'cuda' cannot be used here")):
        with pytest.raises(NoImplementationError, match=message):
            Cache(model, "nvfp4", attention_backend=name)


def test_cache_refuses_a_mask_that_changes_the_past() -> None:
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    feed(model, cache, token_ids(1, 10))
    mask = torch.ones(1, 11, dtype=torch.int64)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="the first 10 as before"):
        model(input_ids=token_ids(1, 1), attention_mask=mask, past_key_values=cache)


def test_cache_refuses_other_architectures() -> None:
    from transformers import AutoModelForCausalLM, StableLmConfig

    config = StableLmConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="'stablelm' is not supported; supported: gem"):
        Cache(model, "nvfp4")


def test_cache_refuses_what_is_no_model() -> None:
    for other in ("path/to/model", make_model("llama").config):
        with pytest.raises(ValueError, match="model: expected a transformers model, got"):
            Cache(other)  # type: ignore[arg-type]


def test_cache_says_who_may_read_it() -> None:
    model = make_model("llama")
    cache = Cache(model, "nvfp4")
    model.set_attn_implementation("eager")
    with pytest.raises(
        AttributeError, match=r"only halfbyte's attention can read a halfbyte\.Cache"
    ):
        model(token_ids(1, 5), past_key_values=cache)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_cache_has_no_derivative(trained: str) -> None:
    """Backward raises: zero gradients would be silently wrong."""
    model = make_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    loss = model(token_ids(1, 5), past_key_values=Cache(model, "nvfp4")).logits.sum()
    with pytest.raises(RuntimeError, match=r"halfbyte\.Cache is for inference and has no deriv"):
        loss.backward()
    model(token_ids(1, 5), use_cache=False).logits.sum().backward()
    assert model.model.layers[0].self_attn.get_submodule(trained).weight.grad is not None


def test_attention_weights_are_not_to_be_had() -> None:
    model = make_model("llama")
    ids, cache = token_ids(1, 5), Cache(model, "nvfp4")
    with pytest.raises(
        ValueError, match=r"output_attentions: .* does not return attention weights"
    ):
        model(input_ids=ids, past_key_values=cache, output_attentions=True)
    assert model(input_ids=ids, past_key_values=cache).logits.isfinite().all()
