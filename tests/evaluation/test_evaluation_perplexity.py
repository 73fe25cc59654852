"""Perplexity through the cache, on small random models; the bundled model has its own tests."""

import math

import pytest
import torch

from halfbyte.assets import bundled_model_path
from halfbyte.evaluation import evaluate_perplexity, text_windows
from halfbyte.kvcache import KV_CACHE_QUANT_REGISTRY
from halfbyte.models import load_tokenizer
from models.zoo import make_model, token_ids

WINDOWS = [token_ids(n, seed=n).tolist() for n in (40, 23, 40)]


@torch.inference_mode()
def dense_nll(model: torch.nn.Module) -> float:
    total = 0.0
    for window in WINDOWS:
        logits = model(input_ids=torch.tensor([window])).logits[0].double().log_softmax(-1)
        total -= float(logits[range(len(window) - 1), window[1:]].sum())
    return total / sum(len(window) - 1 for window in WINDOWS)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_evaluate_perplexity_unquantized_equals_a_dense_pass(
    architecture: str, chunk_size: int
) -> None:
    model = make_model(architecture)
    expected = dense_nll(model)
    result = evaluate_perplexity(model, WINDOWS, ["float32"], chunk_size)[0]
    assert result.nll == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert result.tokens == 100


def test_evaluate_perplexity_is_the_same_for_every_chunk_size() -> None:
    model = make_model("qwen3")
    names = list(KV_CACHE_QUANT_REGISTRY)
    first, *others = (evaluate_perplexity(model, WINDOWS, names, c) for c in (1, 5, 16, 512))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.kv_cache_dtype == b.kv_cache_dtype
            assert a.nll == pytest.approx(b.nll, rel=2e-4)
            assert a.kl_divergence == pytest.approx(b.kl_divergence, rel=2e-2, abs=1e-5)
            assert a.nll_increase == pytest.approx(b.nll_increase, rel=2e-2, abs=1e-4)
            assert a.top1 == pytest.approx(b.top1, abs=0.02)


def test_evaluate_perplexity_reads_the_cache() -> None:
    model = make_model("qwen3")
    names = list(KV_CACHE_QUANT_REGISTRY)
    results = evaluate_perplexity(model, WINDOWS, names, 512, kv_recipes=["plain"])
    by_name = {result.kv_cache_dtype: result for result in results}
    assert by_name["bfloat16"].kl_divergence == 0
    assert (by_name["bfloat16"].nll_increase, by_name["bfloat16"].top1) == (0, 1)
    for result in results:
        increase = result.nll - by_name["bfloat16"].nll
        assert result.nll_increase == pytest.approx(increase, rel=1e-3, abs=1e-6)
        assert result.nll_increase_stderr >= 0
    assert by_name["nvfp4"].top1 <= by_name["fp8_e4m3"].top1 <= 1
    assert by_name["nvfp4"].nll_increase_stderr > by_name["fp8_e4m3"].nll_increase_stderr
    assert by_name["float32"].kl_divergence < 1e-4
    # A single chunk as long as the text still shows what the format loses.
    assert by_name["fp8_e4m3"].kl_divergence > 1e-4
    assert by_name["nvfp4"].kl_divergence > by_name["fp8_e4m3"].kl_divergence
    assert by_name["nvfp4"].bytes_per_token == 4 * 2 * 2 * 18


def test_evaluate_perplexity_in_groups_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    whole = evaluate_perplexity(model, WINDOWS, ["nvfp4"], 8)
    monkeypatch.setattr("halfbyte.evaluation.perplexity._MAX_LOGITS", 1)
    one_by_one = evaluate_perplexity(model, WINDOWS, ["nvfp4"], 8)
    assert one_by_one[0].nll == pytest.approx(whole[0].nll, rel=1e-5)


def test_evaluate_perplexity_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    evaluate_perplexity(
        make_model("llama"),
        WINDOWS,
        ["nvfp4"],
        16,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (206, 206)


@pytest.mark.parametrize(
    ("windows", "chunk_size", "message"),
    [
        (WINDOWS, 0, "chunk_size"),
        ([], 1, "windows"),
        ([[5]], 1, "at least 2 tokens"),
        ([[5] * 257], 1, "257 tokens exceed the model's context of 256"),
    ],
    ids=["chunk", "none", "too-short", "too-long"],
)
def test_evaluate_perplexity_refuses(windows: list, chunk_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_perplexity(make_model("llama"), windows, ["nvfp4"], chunk_size)


class Characters:
    """A tokenizer whose ids are code points, with 0 as the beginning of a text."""

    bos_token_id: int | None = 0

    def __call__(self, text: str, add_special_tokens: bool) -> "Characters":
        self.input_ids = [ord(c) for c in text]
        return self

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_text_windows_predict_every_token_once() -> None:
    windows, num_bytes = text_windows(Characters(), ["abcdefg", "", "é"], window=4)
    assert ["".join(map(chr, w[1:])) for w in windows] == ["abc", "def", "g", "é"]
    assert {w[0] for w in windows} == {0}
    assert num_bytes == 7 + 2


def test_text_windows_stop_after_enough_tokens() -> None:
    windows, num_bytes = text_windows(Characters(), ["a" * 100], window=11, max_tokens=20)
    assert [len(window) for window in windows] == [11, 9]
    assert num_bytes == 18


@pytest.mark.parametrize("window", [2, 3, 8, 64])
def test_text_windows_count_bytes_of_cut_characters(window: int) -> None:
    text = "héé 日本語 🎉 naïve\n" * 30
    _, num_bytes = text_windows(load_tokenizer(bundled_model_path()), [text], window)
    assert num_bytes == len(text.encode())


def test_text_windows_refuse_nothing() -> None:
    with pytest.raises(ValueError, match="no token to predict"):
        text_windows(Characters(), [""], window=4)
