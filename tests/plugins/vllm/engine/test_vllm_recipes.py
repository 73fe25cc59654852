"""Recipes of K and V inside vLLM: token for token as `halfbyte.LLM`, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.kvcache import KVRecipe
from halfbyte.models import find_kv_scales
from models.zoo import make_model
from plugins.vllm.engine.engines import (
    BUNDLED,
    TEXTS,
    assert_ours,
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    run_apart,
    vllm_engine,
)

# Without the last tokens in 16 bits, for which vLLM has no place yet.
RECIPE = KVRecipe.parse("balanced").of_pages
BALANCED: dict[str, Any] = {"additional_config": {"halfbyte": {"kv_recipe": "balanced"}}}


def test_balanced_equals_halfbyte_s_engine() -> None:
    """Whatever the chunks, the block size and the prefixes; not the tokens of `plain`."""
    expected = halfbyte_tokens(BUNDLED, TEXTS, kv_recipe=RECIPE)
    with vllm_engine(**BALANCED, block_size=32) as llm:
        for impl in assert_ours(llm, "nvfp4_4over6"):
            assert impl.transform is not None
            assert impl.transform.mean is not None
            assert impl.transform.first_keys is not None
        found = generate(llm, TEXTS)
        assert generate(llm, TEXTS) == found  # prefixes from the cache
    assert_same_tokens(found, expected, TEXTS, BUNDLED, kv_recipe=RECIPE)
    chunked: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with vllm_engine(**BALANCED, **chunked, enable_prefix_caching=False) as llm:
        assert generate(llm, TEXTS) == found
    with vllm_engine() as llm:
        assert generate(llm, TEXTS) != found


def test_accurate_equals_halfbyte_s_engine() -> None:
    """Whatever the chunks; not the tokens of `balanced`."""
    recipe = KVRecipe.parse("accurate").of_pages
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
    """Where scales have a calibration; else `plain`."""
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


def test_dummy_weights_have_a_calibration(tmp_path: Path) -> None:
    """For benchmarks, of the model's sizes."""
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
