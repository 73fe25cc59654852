"""On a GPU: blocks that leave the engine, and checkpoints that vLLM loads without halfbyte."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from models.zoo import token_ids
from plugins.vllm.engine.engines import TEXTS, assert_ours, generate, metrics, varied, vllm_engine
from plugins.vllm.engine.gpu_engines import GPU, assert_alike, assert_rings, gpu_engine, scored
from plugins.vllm.engine.test_vllm_weights import quantized

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache_of_a_worker")]


@pytest.mark.usefixtures("model_runner")
@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_blocks_come_back_from_the_host(recipe: str) -> None:
    """Few pages on the GPU: the second time, prompts are copied back by vLLM's connector."""
    prompts = [token_ids(300, seed=n).tolist() for n in range(8)]
    options: dict[str, Any] = {**GPU, "kv_recipe": recipe, "block_size": 16}
    with gpu_engine(**options) as llm:
        expected = generate(llm, prompts, 24)
    options |= {"num_gpu_blocks_override": 96, "max_num_seqs": 2, "kv_offloading_size": 0.25}
    with gpu_engine(**options, enable_prefix_caching=True, disable_log_stats=False) as llm:
        assert_rings(assert_ours(llm, "nvfp4"), recipe)
        assert generate(llm, prompts, 24) == expected
        before = metrics(llm)["vllm:external_prefix_cache_hits"]
        again = generate(llm, prompts, 24)
        hits = metrics(llm)["vllm:external_prefix_cache_hits"] - before
    assert hits > 1000
    if recipe == "plain":  # after a hit, `balanced` has the last tokens in four bits
        assert again == expected
    assert varied(again)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_vllm_alone_loads_our_checkpoints(dialect: str, tmp_path: Path) -> None:
    """vLLM's own kernels give about the log-probabilities that halfbyte's give."""
    folder = quantized(tmp_path, dialect, activations=False)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        expected = pool.submit(_scores_of_vllm_alone, folder).result()
    options = {**GPU, "kv_cache_dtype": "auto"}
    with gpu_engine(folder, dtype="bfloat16", **options) as llm:
        assert_ours(llm, "bfloat16")
        found = scored(llm, TEXTS)
    assert_alike(found, expected, 0.2)


def _scores_of_vllm_alone(folder: Path) -> Any:
    os.environ["VLLM_PLUGINS"] = ""
    options = {**GPU, "kv_cache_dtype": "auto", "attention_backend": None}
    with vllm_engine(folder, dtype="bfloat16", kv_recipe=None, **options) as llm:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        with pytest.raises(ValueError, match="CUSTOM"):
            AttentionBackendEnum.CUSTOM.get_path()
        return scored(llm, TEXTS)
