"""Recipes of K and V inside vLLM: tokens equal those of `halfbyte.LLM` in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.kvcache import KVRecipe
from halfbyte.models import find_kv_scales
from halfbyte.plugins.vllm.checks import check_config
from halfbyte.plugins.vllm.scales import check_scales
from halfbyte.plugins.vllm.warmup import warm_up_attention
from models.zoo import make_model
from plugins.vllm.engine.engines import (
    BUNDLED,
    NGRAM,
    TEXTS,
    assert_ours,
    assert_same_but_one,
    assert_same_tokens,
    example_connector,
    generate,
    halfbyte_tokens,
    metrics,
    needs_page_specs,
    outputs_of,
    run_apart,
    tokens_after_hits,
    tokens_of,
    varied,
    vllm_engine,
)

BALANCED: dict[str, Any] = {"additional_config": {"halfbyte": {"kv_recipe": "balanced"}}}
LAST_TOKENS = KVRecipe.parse("balanced").recent_tokens


def test_balanced_equals_halfbyte_s_engine() -> None:
    """Its last tokens in 16 bits, whatever the chunks, batches, preemptions and prefixes; not the
    tokens of `plain`, nor those from the pages alone."""
    expected = halfbyte_tokens(BUNDLED, TEXTS, kv_recipe="balanced")
    prompts = [TEXTS[1] * 4 + text for text in TEXTS]
    with vllm_engine(**BALANCED, block_size=16) as llm:
        for impl in assert_ours(llm, "nvfp4_4over6"):
            assert impl.transform is not None
            assert impl.transform.mean is not None
            assert impl.transform.first_keys is not None
            assert impl.recent_tokens == LAST_TOKENS
        found = generate(llm, TEXTS)
        after_hits = outputs_of(llm, prompts, 24)
    assert_same_tokens(found, expected, TEXTS, BUNDLED, kv_recipe="balanced")
    of_pages = KVRecipe.parse("balanced").of_pages
    assert halfbyte_tokens(BUNDLED, TEXTS, kv_recipe=of_pages) != found
    # A ring lacks tokens that were found as pages, often in the same step that writes these pages.
    hits = [output.num_cached_tokens for output in after_hits]
    assert sum(hit >= LAST_TOKENS for hit in hits) >= 5
    expected = tokens_after_hits(BUNDLED, prompts, hits, 24, kv_recipe="balanced")
    assert_same_but_one(tokens_of(after_hits), expected)
    small: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 28,
        "block_size": 16,
        "max_model_len": 256,
    }
    with vllm_engine(
        **BALANCED, **small, enable_prefix_caching=False, disable_log_stats=False
    ) as llm:
        assert generate(llm, TEXTS * 2) == found * 2
        assert metrics(llm)["vllm:num_preemptions"] > 4
    with vllm_engine() as llm:
        assert generate(llm, TEXTS) != found


@needs_page_specs
def test_rings_are_filled_from_a_connector_s_pages(tmp_path: Path) -> None:
    """One engine writes pages to disk. In a second one the last tokens are read from them."""
    transfer = example_connector(tmp_path)
    prompts = [TEXTS[1] * 4 + text for text in TEXTS]
    options: dict[str, Any] = {**BALANCED, "block_size": 16, "enable_prefix_caching": False}
    results = []
    for _ in range(2):
        with vllm_engine(kv_transfer_config=transfer, **options) as llm:
            assert all(impl.rings is not None for impl in assert_ours(llm))
            results.append(outputs_of(llm, prompts, 24))
    for outputs in results:
        hits = [output.num_cached_tokens for output in outputs]
        if outputs is results[0]:
            assert not any(hits)
        else:
            assert sum(hit > LAST_TOKENS for hit in hits) >= 5
        expected = tokens_after_hits(BUNDLED, prompts, hits, 24, kv_recipe="balanced")
        assert_same_but_one(tokens_of(outputs), expected)
        assert varied(expected)


def test_warming_up_changes_no_token() -> None:
    """It writes only to pages and rings before the first request."""
    from vllm.v1.worker.gpu_worker import Worker

    with vllm_engine(**BALANCED) as llm:
        expected = generate(llm, TEXTS)
    assert hasattr(Worker, "halfbyte_warms_up")
    with vllm_engine(**BALANCED) as llm:
        [first, *_] = impls = assert_ours(llm)
        assert first.rings is not None
        first.rings[0].fill_(1.0)
        layers = warm_up_attention(llm.llm_engine.vllm_config, torch.device("cpu"))
        assert layers == len({impl.kind(impl.head_size) for impl in impls}) > 0
        assert (first.rings[0] != 1.0).any()
        assert generate(llm, TEXTS) == expected


@needs_page_specs  # 0.24 cannot on CPUs: its own sampling kernel refuses an argument
def test_drafts_change_no_token() -> None:
    """Rejected draft tokens were written to the rings, too."""
    with vllm_engine(**BALANCED) as llm:
        expected = generate(llm, TEXTS)
    found, counted = run_apart(TEXTS, **BALANCED, speculative_config=NGRAM)
    assert found == expected
    drafts = counted["vllm:spec_decode_num_draft_tokens"]
    assert 10 < counted["vllm:spec_decode_num_accepted_tokens"] < drafts


def test_accurate_equals_halfbyte_s_engine() -> None:
    """With its last tokens in 16 bits, for any chunks."""
    recipe = KVRecipe.parse("accurate")
    options: dict[str, Any] = {"additional_config": {"halfbyte": {"kv_recipe": "accurate"}}}
    expected = halfbyte_tokens(BUNDLED, TEXTS, kv_recipe=recipe)
    with vllm_engine(**options) as llm:
        for impl in assert_ours(llm, "nvfp4_4over6"):
            assert impl.transform is not None
            assert impl.transform.feedback is not None
            assert impl.transform.v_weights is not None
        found = generate(llm, TEXTS)
    assert_same_tokens(found, expected, TEXTS, BUNDLED, kv_recipe=recipe)
    chunked: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with vllm_engine(**options, **chunked, enable_prefix_caching=False) as llm:
        assert generate(llm, TEXTS) == found


def test_balanced_is_the_default(tmp_path: Path) -> None:
    """If the scales have a calibration; else `plain`."""
    with vllm_engine(kv_recipe=None) as llm:
        for impl in assert_ours(llm, "nvfp4_4over6"):
            assert impl.transform is not None
        found = generate(llm, TEXTS[:2])
    with vllm_engine(**BALANCED) as llm:
        assert generate(llm, TEXTS[:2]) == found
    file = tmp_path / "scales.json"
    scales = find_kv_scales(Path(BUNDLED), {})
    assert scales is not None
    replace(scales, calibration=None).save_file(file)
    given = {"halfbyte": {"kv_scales": str(file)}}
    with vllm_engine(kv_recipe=None, additional_config=given) as llm:
        for impl in assert_ours(llm, "nvfp4"):
            assert impl.transform is None


def test_scales_are_read_while_layers_are_made() -> None:
    """vLLM has then set a default device (here `meta`) and the model's dtype."""
    from vllm.engine.arg_utils import EngineArgs

    def config() -> Any:
        options: dict[str, Any] = {"attention_backend": "CUSTOM", "kv_cache_dtype": "nvfp4"}
        return EngineArgs(model=BUNDLED, max_model_len=128, **options).create_engine_config()

    expected = check_config(config())
    assert expected.kv_recipe == "balanced"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            vllm_config = config()
            assert check_config(vllm_config) == expected
            check_scales(vllm_config, expected, expected.recipe)
            assert torch.get_default_dtype() == torch.bfloat16
            assert torch.empty(0).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)


def test_dummy_weights_have_a_calibration(tmp_path: Path) -> None:
    """A dummy calibration of the model's sizes, for benchmarks."""
    make_model("llama").config.save_pretrained(tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    with vllm_engine(tmp_path, load_format="dummy", **options, **BALANCED) as llm:
        for impl in assert_ours(llm, "nvfp4_4over6"):
            assert impl.transform is not None
        assert [len(tokens) for tokens in generate(llm, [[1, 2, 3], [4] * 70], 8)] == [8, 8]


@pytest.mark.slow
def test_balanced_on_two_ranks_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with vllm_engine(**BALANCED) as llm:
        expected = generate(llm, TEXTS)
    found, _ = run_apart(TEXTS, in_process=False, tensor_parallel_size=2, **BALANCED)
    assert found == expected
