"""4-bit experts on halfbyte's kernels, through vLLM's own loaders and routers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.plugins.vllm.moe_method import HalfbyteMoeMethod
from models.zoo import token_ids
from plugins.vllm.engine.engines import (
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    vllm_engine,
)
from plugins.vllm.engine.moe_checkpoints import NUM_LAYERS, make_gpt_oss, make_mxfp4, make_nvfp4

PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
PLAIN: dict[str, Any] = {"kv_cache_dtype": "float32"}
MAKE: dict[str, Callable[[Path], Path]] = {
    "qwen3-modelopt": lambda folder: make_nvfp4(folder, "qwen3_moe", "modelopt", "nvfp4-a16"),
    "mixtral-w4a4": lambda folder: make_nvfp4(folder, "mixtral", "compressed-tensors", "nvfp4"),
    "gpt-oss": make_gpt_oss,
    "qwen2-shared-expert": lambda folder: make_nvfp4(folder, "qwen2_moe", "modelopt", "nvfp4"),
}


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's 4-bit layers take 16 bits only; equality needs float32."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    for config in (ModelOptNvFp4Config, CompressedTensorsConfig, GptOssMxfp4Config):
        monkeypatch.setattr(config, "get_supported_act_dtypes", lambda *_: dtypes)


def engine(folder: Path, **options: Any) -> Any:
    options = {"max_model_len": 128, "block_size": 16, "skip_tokenizer_init": True, **options}
    return vllm_engine(folder, **{"kv_cache_dtype": "auto", **options})


def assert_our_experts(llm: Any, weight_format: str) -> None:
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    modules = [m for m in model.modules() if type(m).__name__.endswith("RoutedExperts")]
    assert len(modules) == NUM_LAYERS
    for method in (module.quant_method for module in modules):
        assert isinstance(method, HalfbyteMoeMethod)
        assert method.kernel is not None
        assert (method.kernel.name, method.kernel.config.weight_format) == ("cpu", weight_format)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-modelopt", "mixtral-w4a4", "gpt-oss"),
        pytest.param("qwen2-shared-expert", marks=pytest.mark.slow),
    ],
)
def test_experts_equal_halfbyte_s_engine(tmp_path: Path, name: str) -> None:
    folder = MAKE[name](tmp_path)
    expected = halfbyte_tokens(folder, PROMPTS, 16, **PLAIN)
    with engine(folder) as llm:
        assert_our_experts(llm, "mxfp4" if name == "gpt-oss" else "nvfp4")
        found = generate(llm, PROMPTS, 16)
    assert_same_tokens(found, expected, PROMPTS, folder, **PLAIN)


@pytest.mark.slow
def test_mxfp4_of_compressed_tensors_equals_dequantized_experts(tmp_path: Path) -> None:
    folder, plain = make_mxfp4(tmp_path)
    expected = halfbyte_tokens(plain, PROMPTS, 16, **PLAIN)
    with engine(folder) as llm:
        assert_our_experts(llm, "mxfp4")
        found = generate(llm, PROMPTS, 16)
    assert_same_tokens(found, expected, PROMPTS, plain, **PLAIN)
