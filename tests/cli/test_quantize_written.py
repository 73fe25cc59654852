"""Running checkpoints that `halfbyte quantize` wrote."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import halfbyte as package
from cli.running import run, small_model
from halfbyte.assets import bundled_model_path, calibration_text
from halfbyte.checkpoints import (
    DIALECTS,
    TENSOR_NAMES,
    Dialect,
    read_declaration,
    read_kv_scales,
)
from halfbyte.models import load_model
from halfbyte.numerics import nvfp4
from halfbyte.quantization import quantize_checkpoint
from models.zoo import token_ids


@pytest.fixture(scope="module", params=DIALECTS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Dialect, Path]:
    """The bundled model with 4-bit weights, activations and KV cache."""
    folder = tmp_path_factory.mktemp("written") / "checkpoint"
    text = folder.with_name("text")
    text.write_text(calibration_text()[:2000])
    quantize_checkpoint(
        bundled_model_path(),
        folder,
        dialect=request.param,
        kv_cache_dtype="nvfp4",
        calibration_file=text,
    )
    return request.param, folder


def dequantized(
    dialect: Dialect, written: Path, source: Path, folder: Path
) -> tuple[Any, dict[str, float]]:
    """The source model with a checkpoint's dequantized weights, and its input scales.

    `folder` is where the dequantized checkpoint goes.
    """
    names = TENSOR_NAMES[dialect]
    tensors = load_file(written / "model.safetensors")
    weights = load_file(source / "model.safetensors")
    input_scales: dict[str, float] = {}
    for key in [key for key in tensors if key.endswith(f".{names.weight_global_scale}")]:
        module = key.removesuffix(f".{names.weight_global_scale}")
        scale = tensors[key]
        weights[f"{module}.weight"] = nvfp4.dequantize(
            tensors[f"{module}.{names.weight}"],
            tensors[f"{module}.{names.weight_scale}"],
            scale if names.global_scale_is_decode else 1 / scale,
        )
        stored = tensors[f"{module}.{names.input_global_scale}"]
        input_scales[module] = float(stored if names.global_scale_is_decode else 1 / stored)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", folder / "config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), input_scales


IDS = token_ids(1, 60)


@torch.inference_mode()
def test_written_checkpoint_loads_and_computes_alike(
    written: tuple[Dialect, Path], tmp_path: Path
) -> None:
    dialect, folder = written
    model = load_model(folder, dtype="float32", device="cpu", quantize_activations=False)
    expected, _ = dequantized(dialect, folder, bundled_model_path(), tmp_path / "plain")
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-3)
    unquantized = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)
    change = (model(IDS).logits - unquantized(IDS).logits).abs().mean()
    assert 0.02 < float(change) < 0.6  # it is quantized, and it is the same model


@torch.inference_mode()
def test_written_checkpoint_quantizes_activations(
    written: tuple[Dialect, Path], tmp_path: Path
) -> None:
    """Layer by layer, on inputs within and beyond the calibrated range."""
    dialect, folder = written
    model = load_model(
        folder,
        dtype="float32",
        device="cpu",
        quantize_activations=True,
        linear_backend="reference",
    )
    expected, scales = dequantized(dialect, folder, bundled_model_path(), tmp_path / "plain")
    generator = torch.Generator().manual_seed(0)
    assert len(scales) == 70
    for name, scale in scales.items():
        plain = expected.get_submodule(name)
        x = torch.randn(5, plain.in_features, generator=generator) * scale * 2688 / 3
        rounded = nvfp4.dequantize(*nvfp4.quantize(x, scale), scale)
        found = model.get_submodule(name)(x)
        torch.testing.assert_close(
            found, plain(rounded), rtol=1e-4, atol=1e-4 * float(x.abs().max())
        )
        assert not torch.allclose(found, plain(x), rtol=1e-3)


def test_written_checkpoint_declares_its_cache(written: tuple[Dialect, Path]) -> None:
    _, folder = written
    options: dict[str, Any] = {"kv_cache_dtype": "auto", "dtype": "float32", "device": "cpu"}
    llm = package.LLM(folder, **options, kv_recipe="plain")
    assert llm.pool.layout(0).k_dtype.value == "nvfp4"
    assert llm.kv_scales is not None
    assert llm.kv_scales.source.startswith("checkpoint")
    stored = {
        name.rpartition(".")[2]: float(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if re.search(r"layers\.3\.self_attn.*\.[kv]_scale$", name)
    }
    assert llm.kv_scales.k_amax[3] == stored["k_scale"] * 2688
    assert llm.kv_scales.v_amax[3] == stored["v_scale"] * 2688
    # The file beside them, with what the default recipe needs.
    llm = package.LLM(folder, **options)
    assert llm.recipe.name == "balanced"
    assert llm.kv_scales is not None
    assert llm.kv_scales.source.startswith("kv_scales.json")


def test_generate_runs_on_a_written_checkpoint(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    written: tuple[Dialect, Path],
) -> None:
    _, folder = written
    arguments = ("--prompt", "import os\n", "--max-tokens", "8", "--kv-cache-dtype", "auto")
    command = ("generate", "--model", str(folder), *arguments, "--json")
    code, out, _ = run(capsys, monkeypatch, *command)
    assert code == 0
    result = json.loads(out)
    assert len(result["tokens"]) == 8
    assert result["kv_cache"]["dtype"] == "nvfp4"
    assert result["kv_cache"]["scales"].startswith("kv_scales.json")
    code, out, _ = run(capsys, monkeypatch, *command, "--kv-recipe", "plain")
    assert code == 0
    result = json.loads(out)
    assert result["kv_cache"]["dtype"] == "nvfp4"
    assert result["kv_cache"]["scales"].startswith("checkpoint")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_cache_in_fp8(tmp_path: Path, dialect: Dialect) -> None:
    text = tmp_path / "text"
    text.write_text(calibration_text()[:500])
    report = quantize_checkpoint(
        bundled_model_path(),
        tmp_path / "checkpoint",
        dialect=dialect,
        weights="nvfp4-a16",
        kv_cache_dtype="fp8",
        calibration_file=text,
    )
    assert report.kv_cache_dtype == "fp8_e4m3"
    llm = package.LLM(tmp_path / "checkpoint", kv_cache_dtype="auto", device="cpu", num_pages=9)
    assert llm.pool.layout(0).k_dtype == "fp8_e4m3"
    assert llm.kv_scales is not None
    stored = read_kv_scales(tmp_path / "checkpoint")
    assert llm.kv_scales.k_amax[3] == pytest.approx(stored[3][0] * 448)


def test_written_checkpoint_loads_in_transformers(written: tuple[Dialect, Path]) -> None:
    """Tagged as ours, it needs no more than `import halfbyte`."""
    _, folder = written
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, dtype="float32", device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, ours(IDS).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("architecture", "num_layers", "expert"),
    [
        ("qwen3_moe", 4 * (4 + 4 * 3), "model.layers.0.mlp.experts.3.gate_proj"),
        ("qwen2_moe", 4 * (4 + 4 * 3 + 3), "model.layers.0.mlp.experts.3.gate_proj"),
        ("mixtral", 4 * (4 + 4 * 3), "model.layers.0.block_sparse_moe.experts.3.w1"),
    ],
)
def test_experts_are_written_one_by_one(
    tmp_path: Path, dialect: Dialect, architecture: str, num_layers: int, expert: str
) -> None:
    source = small_model(tmp_path / "source", architecture)
    target = tmp_path / "target"
    report = quantize_checkpoint(source, target, dialect=dialect)
    assert len(report.layers) == num_layers
    written = load_file(target / "model.safetensors")
    assert f"{expert}.{TENSOR_NAMES[dialect].weight_global_scale}" in written
    stored = load_file(source / "model.safetensors")
    assert {name.rpartition(".")[0] for name in written} == {
        name.rpartition(".")[0] for name in stored
    }
    declared = read_declaration(target, json.loads((target / "config.json").read_text()))
    assert declared is not None
    assert declared.scheme_of(expert) == "nvfp4"
    router = expert.partition(".experts.")[0] + ".gate"
    assert declared.scheme_of(router) is None
    model = load_model(target, dtype="float32", device="cpu", quantize_activations=False)
    expected, _ = dequantized(dialect, target, source, tmp_path / "plain")
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-3)
