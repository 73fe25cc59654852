"""NVFP4 weights of both dialects on halfbyte's kernels, through vLLM's own loaders."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from halfbyte.plugins.vllm import linear_kernel
from halfbyte.plugins.vllm.attention import HalfbyteAttentionImpl
from halfbyte.quantization import quantize_checkpoint
from plugins.vllm.engine.engines import (
    BUNDLED,
    TEXTS,
    allow_float32,
    assert_ours,
    assert_same_tokens,
    generate,
    halfbyte_tokens,
    layers_of,
    vllm_engine,
    without,
)
from slow import slow

KINDS = [
    ("modelopt", False),
    slow("modelopt", True),
    slow("compressed-tensors", False),
    ("compressed-tensors", True),
]


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_float32(monkeypatch)


def quantized(tmp_path: Path, dialect: str, activations: bool) -> Path:
    out, text = tmp_path / "quantized", tmp_path / "text.txt"
    text.write_text("".join(TEXTS) * 4)
    quantize_checkpoint(
        BUNDLED,
        out,
        dialect=dialect,
        weights="nvfp4" if activations else "nvfp4-a16",
        kv_cache_dtype="nvfp4",
        calibration_file=text,
    )
    return out


def kernels_of(llm: Any) -> list[Any]:
    """Kernels of vLLM's NVFP4 layers."""
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", None)
        kernel = getattr(method, "kernel", None) or getattr(scheme, "kernel", None)
        kernel = kernel or getattr(module, "kernel", None)
        if kernel is not None:
            found.append(kernel)
    return found


@pytest.mark.parametrize(("dialect", "activations"), KINDS)
def test_quantized_checkpoints_equal_halfbyte_s_engine(
    tmp_path: Path, dialect: str, activations: bool, caplog: pytest.LogCaptureFixture
) -> None:
    linear_kernel._log_choice.cache_clear()
    folder = quantized(tmp_path, dialect, activations)
    expected = halfbyte_tokens(folder, TEXTS)
    # ModelOpt's declaration turns vLLM's "auto" into nvfp4.
    dtype = "auto" if dialect == "modelopt" else "nvfp4"
    with vllm_engine(folder, kv_cache_dtype=dtype) as llm:
        assert_ours(llm, "nvfp4")
        names = {type(kernel).__module__ for kernel in kernels_of(llm)}
        assert names == {"halfbyte.plugins.vllm.linear_kernel"}
        found = generate(llm, TEXTS)
    assert_same_tokens(found, expected, TEXTS, folder)
    assert ("would quantize (W4A4)" in caplog.text) == activations


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_parts_keep_their_own_global_scales(tmp_path: Path, dialect: str) -> None:
    """k's scale differs from q's and v's, up's from gate's: using their max would be wrong."""
    folder = quantized(tmp_path, dialect, activations=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    for module, factor in (("k_proj", 1.5), ("v_proj", 0.75), ("up_proj", 0.625)):
        changed = [key for key in tensors if key.endswith(f"{module}.{name}")]
        assert changed
        for key in changed:
            tensors[key] = tensors[key] * factor
    save_file(tensors, file, metadata={"format": "pt"})
    expected = halfbyte_tokens(folder, TEXTS)
    with vllm_engine(folder) as llm:
        assert_ours(llm, "nvfp4")
        found = generate(llm, TEXTS)
    assert_same_tokens(found, expected, TEXTS, folder)


def test_layers_without_our_attention(tmp_path: Path) -> None:
    """With `linear: on` only; without it vLLM raises, because it has no such kernel on CPUs."""
    folder = quantized(tmp_path, "compressed-tensors", activations=True)
    expected = halfbyte_tokens(folder, TEXTS, kv_cache_dtype="float32")
    options: dict[str, Any] = {"attention_backend": None, "kv_cache_dtype": "auto"}
    with vllm_engine(folder, additional_config={"halfbyte": {"linear": "on"}}, **options) as llm:
        assert not isinstance(next(iter(layers_of(llm).values())).impl, HalfbyteAttentionImpl)
        found = generate(llm, TEXTS)
    assert_same_tokens(found, expected, TEXTS, folder, kv_cache_dtype="float32")
    for given in ({}, {"halfbyte": {"linear": "off"}}):
        with (
            pytest.raises(Exception, match="find a kernel that can implement the NVFP4 linear"),
            vllm_engine(folder, additional_config=given, **options),
        ):
            pass


@pytest.mark.parametrize(
    ("dialect", "tensor", "message"),
    [
        ("modelopt", "layers.1.self_attn.k_proj.weight", "qkv_proj: codes are missing, in part 1"),
        (
            *("compressed-tensors", "layers.1.self_attn.v_proj.weight_global_scale"),
            "qkv_proj: global scale is missing, or not positive, in part 2",
        ),
        slow(
            *("compressed-tensors", "layers.1.mlp.down_proj.weight_scale"),
            "down_proj: block scales are missing",
        ),
    ],
)
def test_a_missing_tensor_is_refused(
    tmp_path: Path, dialect: str, tensor: str, message: str
) -> None:
    folder = without(quantized(tmp_path, dialect, activations=False), tensor)
    with pytest.raises(Exception, match=rf"layers\.1\..*{message}"), vllm_engine(folder):
        pass


def test_dummy_weights_are_not_missing(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "modelopt", activations=False)
    with vllm_engine(folder, load_format="dummy") as llm:
        assert kernels_of(llm)
        assert len(generate(llm, TEXTS[:1])) == 1
