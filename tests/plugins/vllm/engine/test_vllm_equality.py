"""Tokens equal those of `halfbyte.LLM` in float32, and unquantized those of vLLM's own backend."""

from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.kvcache import KVScales, read_tokens, reshape_and_cache
from halfbyte.plugins.vllm.formats import block_size_of, pages_of
from plugins.vllm.engine.engines import (
    BUNDLED,
    NGRAM,
    TEXTS,
    assert_ours,
    assert_same_tokens,
    example_connector,
    generate,
    halfbyte_tokens,
    layers_of,
    metrics,
    needs_page_specs,
    run_apart,
    varied,
    vllm_engine,
)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    """Tokens of vLLM with an nvfp4 cache, which equal those of `halfbyte.LLM`."""
    with vllm_engine() as llm:
        assert_ours(llm, "nvfp4")
        tokens = generate(llm, TEXTS)
        assert [generate(llm, [text])[0] for text in TEXTS] == tokens  # one by one
    assert_same_tokens(tokens, halfbyte_tokens(BUNDLED, TEXTS), TEXTS, BUNDLED)
    return tokens


@pytest.mark.parametrize(
    "kv_cache_dtype", ["fp8", "fp8_e5m2", pytest.param("nvfp4_4over6", marks=needs_page_specs)]
)
def test_other_formats_equal_halfbyte_s_engine(kv_cache_dtype: str) -> None:
    expected = halfbyte_tokens(BUNDLED, TEXTS, kv_cache_dtype=kv_cache_dtype)
    with vllm_engine(kv_cache_dtype=kv_cache_dtype) as llm:
        assert_ours(llm, {"fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype))
        found = generate(llm, TEXTS)
    assert_same_tokens(found, expected, TEXTS, BUNDLED, kv_cache_dtype=kv_cache_dtype)


def test_unquantized_equals_vllm_s_own_attention() -> None:
    with vllm_engine(kv_cache_dtype="auto", attention_backend=None) as llm:
        assert not any(
            type(layer.impl).__module__.startswith("halfbyte") for layer in layers_of(llm).values()
        )
        expected = generate(llm, TEXTS)
    assert varied(expected)
    with vllm_engine(kv_cache_dtype="auto") as llm:
        assert_ours(llm, "float32")
        assert generate(llm, TEXTS) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 32},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_num_seqs": 8},
    ],
    ids=["block-size", "chunks"],
)
def test_the_scheduler_s_options_change_no_token(
    options: dict[str, Any], tokens: list[list[int]]
) -> None:
    with vllm_engine(**options) as llm:
        assert_ours(llm, "nvfp4")
        assert generate(llm, TEXTS) == tokens


def test_tokens_are_stored_without_attention() -> None:
    """As DFlash drafts store a prompt's."""
    slots = torch.tensor([17, -1, 40])
    with vllm_engine() as llm:
        layer = next(iter(layers_of(llm).values()))
        impl, heads = layer.impl, layer.impl.num_kv_heads
        key = torch.randn(3, heads, layer.head_size)
        value = torch.randn(3, heads, layer.head_size_v)
        impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        size = block_size_of(layer.kv_cache)
        layout = impl.format.layout(layer.head_size, layer.head_size_v, heads, size)
        pages = pages_of(layer.kv_cache, layout)
        found = read_tokens(pages, slots[[0, 2]], layout, impl.k_scale, impl.v_scale)
        expected = torch.zeros_like(pages)
        reshape_and_cache(key, value, expected, slots, layout, impl.k_scale, impl.v_scale)
        wanted = read_tokens(expected, slots[[0, 2]], layout, impl.k_scale, impl.v_scale)
    for x, y in zip(found, wanted, strict=True):
        assert x.any()
        assert torch.equal(x, y)


def test_preemption_changes_no_token(tokens: list[list[int]]) -> None:
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 36,
        "block_size": 16,
        "max_model_len": 256,
    }
    with vllm_engine(**options, enable_prefix_caching=False, disable_log_stats=False) as llm:
        assert_ours(llm, "nvfp4")
        assert generate(llm, TEXTS * 4) == tokens * 4
        assert metrics(llm)["vllm:num_preemptions"] > 10


@needs_page_specs  # 0.24 cannot on CPUs: its own sampling kernel refuses an argument
def test_drafts_from_the_prompt_change_no_token(tokens: list[list[int]]) -> None:
    found, counted = run_apart(TEXTS, speculative_config=NGRAM)
    assert found == tokens
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 10


@needs_page_specs
def test_a_draft_model_has_scales_of_its_own(tokens: list[list[int]], tmp_path: Path) -> None:
    """The model is its own draft: with its scales all drafts are accepted, with wrong ones few."""
    draft = {
        "method": "draft_model",
        "model": BUNDLED,
        "num_speculative_tokens": 2,
        "attention_backend": "CUSTOM",
    }
    stored = KVScales.load(BUNDLED)
    assert stored is not None
    amax = [tuple(1e7 * x for x in side) for side in (stored.k_amax, stored.v_amax)]
    wild = KVScales(amax[0], amax[1], "test").save(tmp_path)
    shares = []
    for options in ({}, {"draft_kv_scales": str(wild)}):
        found, counted = run_apart(
            TEXTS, speculative_config=draft, additional_config={"halfbyte": options}
        )
        assert found == tokens
        accepted = counted["vllm:spec_decode_num_accepted_tokens"]
        shares.append(accepted / counted["vllm:spec_decode_num_draft_tokens"])
    assert shares[0] > 0.95
    assert shares[1] < 0.8


def test_prefixes_from_the_cache_change_no_token(tokens: list[list[int]]) -> None:
    with vllm_engine(enable_prefix_caching=True, block_size=16, disable_log_stats=False) as llm:
        assert_ours(llm, "nvfp4")
        prompts = [TEXTS[1] * 4 + text for text in TEXTS]
        first, again = generate(llm, prompts), generate(llm, prompts)
        assert generate(llm, TEXTS) == tokens
        counted = metrics(llm)
    assert first == again
    assert varied(first)
    assert counted["vllm:prefix_cache_hits"] > 0.4 * counted["vllm:prefix_cache_queries"]
    with vllm_engine(enable_prefix_caching=False) as llm:
        assert_ours(llm, "nvfp4")
        assert generate(llm, prompts) == first


@needs_page_specs
def test_a_connector_brings_back_whole_blocks(tmp_path: Path, tokens: list[list[int]]) -> None:
    """One engine writes pages to disk, a second one reads them."""
    transfer = example_connector(tmp_path)
    prompts = [TEXTS[1] * 4 + text for text in TEXTS]
    options: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": False}
    results, hits = [], []
    for _ in range(2):
        with vllm_engine(kv_transfer_config=transfer, disable_log_stats=False, **options) as llm:
            assert_ours(llm, "nvfp4")
            results.append(generate(llm, prompts))
            hits.append(metrics(llm)["vllm:external_prefix_cache_hits"])
        assert list(tmp_path.glob("halfbyte-*/**/*.safetensors"))
    assert results[0] == results[1]
    assert hits[0] == 0
    assert hits[1] > 400
    with vllm_engine(enable_prefix_caching=False) as llm:
        assert generate(llm, prompts) == results[0]
