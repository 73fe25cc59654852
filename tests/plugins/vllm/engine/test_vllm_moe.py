"""4-bit experts on halfbyte's kernels, through vLLM's own loaders and routers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from checkpoints.mxfp4_folders import make_gpt_oss, make_mxfp4
from halfbyte.checkpoints import read_kv_scales
from halfbyte.quantization import quantize_checkpoint
from models.zoo import token_ids
from plugins.vllm.engine.engines import (
    BUNDLED,
    allow_float32,
    assert_our_experts,
    assert_ours,
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    run_apart,
    vllm_engine,
    without,
)
from plugins.vllm.engine.moe_checkpoints import make_nvfp4

PROMPTS = [token_ids(n, seed=n).tolist() for n in (5, 33, 17, 60)]
PLAIN: dict[str, Any] = {"kv_cache_dtype": "float32"}
ENGINE: dict[str, Any] = {
    "kv_cache_dtype": "auto",
    "max_model_len": 128,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
MAKE: dict[str, Callable[[Path], Path]] = {
    "qwen3-modelopt": lambda folder: make_nvfp4(folder, "qwen3_moe", "modelopt", "nvfp4-a16"),
    "mixtral-w4a4": lambda folder: make_nvfp4(folder, "mixtral", "compressed-tensors", "nvfp4"),
    "gpt-oss": make_gpt_oss,
    "qwen2-shared-expert": lambda folder: make_nvfp4(folder, "qwen2_moe", "modelopt", "nvfp4"),
}


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_float32(monkeypatch)


def engine(folder: Path, **options: Any) -> Any:
    return vllm_engine(folder, **{**ENGINE, **options})


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
        assert_our_experts(llm, "cpu", "mxfp4" if name == "gpt-oss" else "nvfp4")
        found = generate(llm, PROMPTS, 16)
    assert_same_tokens(found, expected, PROMPTS, folder, **PLAIN)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gpt-oss", "layers.1.mlp.experts.down_proj_scales", "w2_weight_scale of all experts"),
        (
            *("gpt-oss", "layers.1.mlp.experts.gate_up_proj_bias"),
            "expert 0: gate_up_proj's biases are missing .and 3 more",
        ),
        pytest.param(
            *("qwen3-modelopt", "layers.1.mlp.experts.2.up_proj.weight_scale"),
            "expert 2: up_proj's block scales are missing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str, tensor: str, message: str) -> None:
    folder = without(MAKE[name](tmp_path), tensor)
    with pytest.raises(Exception, match=f"layers.1.*{message}"), engine(folder):
        pass


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3-modelopt", "layers.1.mlp.experts.2.up_proj.weight"),
        pytest.param("gpt-oss", "layers.1.mlp.experts.down_proj_blocks", marks=pytest.mark.slow),
    ],
)
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, name: str, tensor: str) -> None:
    """vLLM would load what there is of it."""
    folder = MAKE[name](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    found = f"model.{tensor}"
    tensors[found] = tensors[found][:3].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Exception, match=r"layers.1.*: expected shape .*, found"), engine(folder):
        pass


def test_a_checkpoint_that_keeps_mxfp4_has_its_own_scales(tmp_path: Path) -> None:
    """vLLM's loader ignores the scales of K and V, halfbyte's attention reads them."""
    source = make_gpt_oss(tmp_path, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED) / name, source)
    folder, text = tmp_path / "kept", tmp_path / "text.txt"
    text.write_text("import os\n" * 20)
    quantize_checkpoint(source, folder, kv_cache_dtype="nvfp4", calibration_file=text)
    expected = halfbyte_tokens(folder, PROMPTS, 16)
    with engine(folder, kv_cache_dtype="nvfp4") as llm:
        assert_our_experts(llm, "cpu", "mxfp4")
        impls = assert_ours(llm, "nvfp4")
        found = generate(llm, PROMPTS, 16)
    assert_same_tokens(found, expected, PROMPTS, folder)
    for layer, scales in read_kv_scales(folder).items():
        impl = impls[layer]
        assert (float(impl.k_scale), float(impl.v_scale)) == pytest.approx(scales, rel=1e-6)


@pytest.mark.slow
def test_mxfp4_of_compressed_tensors_equals_dequantized_experts(tmp_path: Path) -> None:
    folder, plain = make_mxfp4(tmp_path)
    expected = halfbyte_tokens(plain, PROMPTS, 16, **PLAIN)
    with engine(folder) as llm:
        assert_our_experts(llm, "cpu", "mxfp4")
        found = generate(llm, PROMPTS, 16)
    assert_same_tokens(found, expected, PROMPTS, plain, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [("gpt-oss", False), ("qwen2-shared-expert", True)],
    ids=["tensor", "expert"],
)
def test_two_ranks_give_the_same_tokens(
    tmp_path: Path, name: str, expert_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    folder = MAKE[name](tmp_path)
    found, _ = run_apart(
        PROMPTS,
        in_process=False,
        max_tokens=16,
        experts=True,
        model=str(folder),
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
        **ENGINE,
    )
    expected = halfbyte_tokens(folder, PROMPTS, 16, **PLAIN)
    assert_same_tokens(found, expected, PROMPTS, folder, **PLAIN)


@pytest.mark.slow
def test_compiled_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = MAKE["qwen3-modelopt"](tmp_path)
    with engine(folder, enforce_eager=False) as llm:
        assert_our_experts(llm, "cpu", "nvfp4")
        found = generate(llm, PROMPTS, 16)
    expected = halfbyte_tokens(folder, PROMPTS, 16, **PLAIN)
    assert_same_tokens(found, expected, PROMPTS, folder, **PLAIN)
