"""On a GPU: blocks that leave the engine, and checkpoints that vLLM loads without halfbyte."""

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.quantization import quantize_checkpoint
from models.zoo import make_model
from plugins.vllm.engine.engines import (
    BUNDLED,
    ROTATED,
    TEXTS,
    assert_ours,
    assert_same_but_one,
    generate,
    metrics,
    outputs_of,
    tokens_of,
    varied,
    vllm_engine,
)
from plugins.vllm.engine.gpu_engines import GPU, assert_alike, assert_rings, gpu_engine, scored

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache_of_a_worker")]


@pytest.mark.usefixtures("model_runner")
@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_blocks_come_back_from_the_host(recipe: str) -> None:
    """Few pages on the GPU: the second time, prompts are copied back by vLLM's connector, after
    which rings are filled from pages as after a hit on the GPU."""
    prompts = ROTATED + [text[200:] + text[:200] for text in ROTATED]
    options: dict[str, Any] = {**GPU, "max_num_seqs": 2, "kv_recipe": recipe, "block_size": 16}
    moved = {"num_gpu_blocks_override": 96, "kv_offloading_size": 0.25, "disable_log_stats": False}
    with gpu_engine(**options, **moved, enable_prefix_caching=True) as llm:
        assert_rings(assert_ours(llm), recipe)
        first = generate(llm, prompts, 24)
        before = metrics(llm)["vllm:external_prefix_cache_hits"]
        again = outputs_of(llm, prompts, 24)
        external = metrics(llm)["vllm:external_prefix_cache_hits"] - before
    with gpu_engine(**options, enable_prefix_caching=True) as llm:
        assert_rings(assert_ours(llm), recipe)
        assert_same_but_one(generate(llm, prompts, 24), first)
        cached = outputs_of(llm, prompts, 24)
    whole = [(len(output.prompt_token_ids) - 1) // 16 * 16 for output in cached]
    assert [output.num_cached_tokens for output in cached] == whole
    loaded = [output.num_cached_tokens for output in again]
    assert external >= 2 * min(whole) > 400, (external, before, loaded, whole)
    # A few tokens that prompts have in common may still be on the GPU.
    assert all(count < 64 or count == n for count, n in zip(loaded, whole, strict=True))
    after_hits = tokens_of(cached)
    expected = [
        hit if count >= 64 else no_hit
        for count, hit, no_hit in zip(loaded, after_hits, first, strict=True)
    ]
    assert_same_but_one(tokens_of(again), expected)
    assert varied(first)


@pytest.mark.parametrize(
    ("source", "dialect", "scales"),
    [
        ("llama", "modelopt", "nvfp4"),
        # vLLM 0.24 alone cannot load scales of K and V by ModelOpt's names for Qwen.
        ("qwen3", "modelopt", None),
        ("qwen3", "compressed-tensors", "nvfp4"),
    ],
)
def test_vllm_alone_loads_our_checkpoints(
    source: str, dialect: str, scales: str | None, tmp_path: Path
) -> None:
    """vLLM's own kernels give about the log-probabilities that halfbyte's give."""
    folder, text = tmp_path / "quantized", tmp_path / "text.txt"
    text.write_text("".join(TEXTS) * 4)
    quantize_checkpoint(
        _llama(tmp_path / "llama") if source == "llama" else BUNDLED,
        folder,
        dialect=dialect,
        weights="nvfp4-a16",
        kv_cache_dtype=scales,
        calibration_file=text if scales else None,
    )
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        expected = pool.submit(_scores_of_vllm_alone, folder).result()
    options = {**GPU, "kv_cache_dtype": "bfloat16"}  # "auto" is the file's, 4 bits
    with gpu_engine(folder, dtype="bfloat16", **options) as llm:
        assert_ours(llm, "bfloat16")
        found = scored(llm, TEXTS)
    assert_alike(found, expected, 0.2)


def _llama(folder: Path) -> Path:
    """A folder with a random model of two layers and the bundled model's tokenizer."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    model = make_model(
        "llama", torch.bfloat16, vocab_size=4096, max_position_embeddings=512, **sizes
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED) / name, folder)
    return folder


def _scores_of_vllm_alone(folder: Path) -> Any:
    os.environ["VLLM_PLUGINS"] = ""
    options = {**GPU, "kv_cache_dtype": "bfloat16", "attention_backend": None}
    with vllm_engine(folder, dtype="bfloat16", kv_recipe=None, **options) as llm:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        with pytest.raises(ValueError, match="CUSTOM"):
            AttentionBackendEnum.CUSTOM.get_path()
        return scored(llm, TEXTS)
