"""On a GPU: kernels are compiled before the first request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from models.zoo import make_model, token_ids
from plugins.vllm.engine.engines import assert_ours, generate
from plugins.vllm.engine.gpu_engines import GPU, assert_rings, gpu_engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache_of_a_worker", "model_runner")]


@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_requests_compile_no_attention_kernel(recipe: str) -> None:
    """Neither prompts of many lengths nor hits in the prefix cache nor batches beyond graphs."""
    options = {**GPU, "kv_recipe": recipe, "max_model_len": 2048, "max_num_seqs": 32}
    with gpu_engine(dtype="bfloat16", enable_prefix_caching=True, **options) as llm:
        assert_rings(assert_ours(llm), recipe)
        lengths = ((9,), (70, 33, 200), (1, 700, 1500), (150,) * 3, (20,) * 24)
        assert compiled_for(llm, lengths, 2000) == []


@pytest.mark.parametrize("on_sm90", [False, True])
@pytest.mark.parametrize("recipe", ["plain", "balanced"])
def test_long_prompts_compile_no_attention_kernel(
    recipe: str, on_sm90: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that PyTorch's dense attention takes, or SM90's kernel, in chunks and after hits."""
    from halfbyte.attention.prefill import chunks, dense
    from halfbyte.attention.prefill.sm90 import launcher as sm90

    if not on_sm90:
        monkeypatch.setattr(sm90, "supports", lambda inputs: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    config = make_model("qwen3", head_dim=128, max_position_embeddings=16384).config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    options: dict[str, Any] = {**GPU, "kv_recipe": recipe, "max_model_len": 16384}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": 8192}
    with gpu_engine(tmp_path, dtype="bfloat16", enable_prefix_caching=True, **options) as llm:
        assert_rings(assert_ours(llm), recipe)
        calls = []
        module, name = (chunks, "run_tiles") if on_sm90 else (dense, "_run_last")
        run = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            calls.append(arguments)
            return run(*arguments)

        monkeypatch.setattr(module, name, counted)
        lengths = ((2048,), (2500,), (4096, 3000), (9000,), (15000, 700))
        assert compiled_for(llm, lengths, 16000) == []
    # SM90's kernel takes all prompts of a step at once, in two layers and the eight steps that have
    # tiles enough; PyTorch's dense attention takes one prompt or block of keys.
    assert len(calls) >= (16 if on_sm90 else 21)


def compiled_for(llm: Any, lengths: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
    """Names of halfbyte's kernels that compile while batches of prompts run, each also with 40
    tokens more (cut to `max_tokens`), whose beginning is then in the prefix cache."""
    from triton import knobs

    from halfbyte.kernels.runtime import nvrtc

    compiled: list[str] = []
    before, cubins = knobs.runtime.jit_post_compile_hook, nvrtc.load.cache_info()
    knobs.runtime.jit_post_compile_hook = lambda **seen: compiled.append(
        f"{seen['fn'].module}.{seen['fn'].name}"
    )
    try:
        for batch in lengths:
            prompts = [token_ids(n, seed=n).tolist() for n in batch]
            generate(llm, prompts, 6)
            again = [ids + token_ids(40, seed=1).tolist() for ids in prompts]
            generate(llm, [ids[:max_tokens] for ids in again], 3)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    loaded = nvrtc.load.cache_info().misses - cubins.misses
    return [name for name in compiled if "halfbyte" in name] + ["a cubin"] * loaded
