"""What the bundled model must be able to do, and what four bits may cost it."""

import lzma
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.assets import bundled_model_path, calibration_text, heldout_texts
from halfbyte.evaluation import evaluate_perplexity, text_windows
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.models import load_model, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return load_tokenizer(bundled_model_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(bundled_model_path(), dtype="float32", device="cpu")


@torch.inference_mode()
def bits(model: Any, ids: list[int]) -> torch.Tensor:
    """Bits of every token but the first, by a dense pass of transformers' own attention."""
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return -logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].double() / math.log(2)


def test_bundled_model_files() -> None:
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path())
    config = model.config
    assert config.model_type == "qwen3"
    assert model.dtype == torch.bfloat16
    assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 10e6
    assert (bundled_model_path() / "model.safetensors").stat().st_size <= 20e6
    assert config.head_dim == 64
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings >= 2048


@pytest.mark.parametrize(
    "text", ["a\r\n\t b  ", "naïve — ünïcödé 日本語 🙂", "", "\0\x7f"], ids=ascii
)
def test_bundled_tokenizer_round_trips(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_calibration_text_fills_a_context(tokenizer: Any) -> None:
    assert len(tokenizer(calibration_text()).input_ids) >= 2048


@pytest.mark.slow  # of a model that does not change
def test_bundled_model_compresses_held_out_files_better_than_xz(
    model: Any,
    tokenizer: Any,
) -> None:
    texts = heldout_texts()
    windows, num_bytes = text_windows(tokenizer, list(texts.values()), 2048)
    everything = "".join(texts.values()).encode()
    assert num_bytes == len(everything)
    ours = sum(float(bits(model, window).sum()) for window in windows) / num_bytes
    together = 8 * len(lzma.compress(everything, preset=9)) / len(everything)
    apart = 8 * sum(len(lzma.compress(t.encode(), preset=9)) for t in texts.values())
    assert ours <= 0.8 * together
    assert ours <= 0.8 * apart / len(everything)


@pytest.mark.slow  # of a model that does not change
def test_bundled_model_copies(model: Any, tokenizer: Any) -> None:
    for text in heldout_texts().values():
        half = tokenizer(text, add_special_tokens=False).input_ids[:750]
        cost = bits(model, [tokenizer.bos_token_id, *half, *half])
        assert cost[750:].sum() < 0.25 * cost[:750].sum()


@pytest.mark.slow
@pytest.mark.parametrize(("window", "tokens"), [(80, 160), (160, 640)])
def test_perplexity_is_the_same_at_every_chunk_size(
    model: Any, tokenizer: Any, window: int, tokens: int
) -> None:
    windows, _ = text_windows(tokenizer, list(heldout_texts().values()), window, tokens)
    names = list(KV_CACHE_QUANT_REGISTRY)
    at_one, *others = (evaluate_perplexity(model, windows, names, c) for c in (1, 16, 512))
    for other in others:
        for a, b in zip(at_one, other, strict=True):
            assert a.nll == pytest.approx(b.nll, rel=1e-3), a.kv_cache_dtype


@pytest.mark.slow  # of a model that does not change
def test_nvfp4_costs_less_than_two_percent_of_nll(
    model: Any,
    tokenizer: Any,
) -> None:
    long_windows, _ = text_windows(tokenizer, list(heldout_texts().values()), 1024, 16000)
    names = ["bfloat16", "nvfp4", "nvfp4_4over6"]
    bf16, *four_bits = evaluate_perplexity(model, long_windows, names, 512)
    for result in four_bits:
        assert bf16.nll < result.nll < 1.02 * bf16.nll
        assert result.bytes_per_token / bf16.bytes_per_token == pytest.approx(9 / 32)
