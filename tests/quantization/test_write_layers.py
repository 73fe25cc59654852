"""Quantizing weights: bits, errors, shared scales."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints.dialects.base import Dialect, OutputFormat
from halfbyte.checkpoints.dialects.registry import DIALECTS
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.checkpoints.output_folder import ShardWriter
from halfbyte.kernels.cpu import library as cpu_library
from halfbyte.numerics import nvfp4
from halfbyte.quantization.calibrate_layers import CalibrationResult
from halfbyte.quantization.output_tensors import global_scale
from halfbyte.quantization.select_layers import LayerSelection
from halfbyte.quantization.write_layers import (
    LayerReport,
    quantize_weight,
    weight_sqnr,
    write_layers,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def random_weight(
    n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight[:, : k // 2] *= 2.0 ** torch.randint(-12, 3, (n, k // 2), generator=generator)
    weight[0, :16] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("recipe", nvfp4.RECIPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "oracle"])
def test_quantize_weight_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: nvfp4.Recipe, dtype: torch.dtype, kernel: bool
) -> None:
    if kernel and cpu_library.library() is None:
        pytest.skip("installed without a C++ compiler")
    if not kernel:
        monkeypatch.setattr(cpu_library, "library", lambda: None)
    weight = random_weight(37, 80, dtype)
    scale = global_scale(float(weight.abs().max()), "modelopt", recipe)
    rounded = quantize_weight(weight, scale.decode, recipe)
    data, scales = rounded
    expected_data, expected_scales = nvfp4.quantize(weight, scale.decode, recipe)
    torch.testing.assert_close(data, expected_data, rtol=0, atol=0)
    torch.testing.assert_close(
        scales.view(torch.uint8), expected_scales.view(torch.uint8), rtol=0, atol=0
    )
    exact = weight.double()
    noise = nvfp4.dequantize(data, scales, scale.decode, torch.float64) - exact
    expected = 10 * math.log10(float(exact.square().sum() / noise.square().sum()))
    sqnr = weight_sqnr(weight, rounded, scale.decode)
    assert sqnr == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(130, 16384), (1, 16), (2**16 + 3, 16)], ids=str)
def test_quantize_weight_in_chunks(shape: tuple[int, int]) -> None:
    """Rows past the first chunk, and a last chunk of few rows."""
    weight = random_weight(*shape)
    scale = global_scale(float(weight.abs().max()), "modelopt")
    data, scales = quantize_weight(weight, scale.decode)
    expected_data, expected_scales = nvfp4.quantize(weight, scale.decode)
    assert torch.equal(data, expected_data)
    assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 0.75])
def test_quantize_weight_without_error(value: float) -> None:
    weight = torch.full((4, 32), value)
    scale = global_scale(value * 448, "modelopt")
    assert weight_sqnr(weight, quantize_weight(weight, scale.decode), scale.decode) is None


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e19, 1e30])
def test_quantize_weight_reports_errors_of_huge_values(
    size: float,
) -> None:
    weight = random_weight(64, 64).float()
    sizes = []
    for factor in (1.0, size):
        scaled = weight * factor
        scale = global_scale(float(scaled.abs().max()), "modelopt")
        sqnr = weight_sqnr(scaled, quantize_weight(scaled, scale.decode), scale.decode)
        assert sqnr is not None
        sizes.append(sqnr)
    assert sizes[1] == pytest.approx(sizes[0], abs=0.5)


def test_quantize_weight_four_over_six_is_closer() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    errors = {}
    for recipe in nvfp4.RECIPES:
        scale = global_scale(float(weight.abs().max()), "modelopt", recipe)
        sqnr = weight_sqnr(weight, quantize_weight(weight, scale.decode, recipe), scale.decode)
        assert sqnr is not None
        errors[recipe] = sqnr
    assert errors["four_over_six"] > errors["amax6"] + 0.5


GROUP = ("layers.0.k_proj", "layers.0.q_proj", "layers.0.v_proj")
SELECTION = LayerSelection(
    groups=(GROUP, ("layers.0.o_proj",)), ignore=("head",), attentions=("layers.0",)
)


def source_tensors() -> dict[str, torch.Tensor]:
    tensors = {
        f"{module}.weight": random_weight(8, 32, seed=i) * (i + 1)
        for i, module in enumerate((*GROUP, "layers.0.o_proj"))
    }
    return {**tensors, "layers.0.q_proj.bias": torch.ones(8), "head.weight": torch.ones(8, 32)}


def quantized(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    output: OutputFormat,
    calibration: CalibrationResult | None = None,
) -> tuple[dict[str, torch.Tensor], list[LayerReport]]:
    """The written tensors of a checkpoint of two shards, with q_proj in the second."""
    source, target = folder / "source", folder / "target"
    source.mkdir()
    target.mkdir()
    second = {name: tensor for name, tensor in tensors.items() if "q_proj" in name}
    first = {name: tensor for name, tensor in tensors.items() if name not in second}
    files = {"model-1.safetensors": first, "model-2.safetensors": second}
    for file, part in files.items():
        save_file(part, source / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    writer = ShardWriter(target)
    index = CheckpointIndex.read(source)
    errors = write_layers(index, writer, SELECTION, output, calibration or CalibrationResult())
    writer.finish()
    return load_file(target / "model.safetensors"), errors


@pytest.mark.parametrize("dialect", DIALECTS)
def test_write_layers_of_a_group_share_their_scale(tmp_path: Path, dialect: Dialect) -> None:
    tensors = source_tensors()
    found, errors = quantized(tmp_path, tensors, OutputFormat(dialect, False))
    name = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    amax = max(float(tensors[f"{module}.weight"].abs().max()) for module in GROUP)
    shared = global_scale(amax, dialect).stored
    for module in GROUP:
        assert torch.equal(found[f"{module}.{name}"], shared)
    o_amax = float(tensors["layers.0.o_proj.weight"].abs().max())
    assert torch.equal(found[f"layers.0.o_proj.{name}"], global_scale(o_amax, dialect).stored)
    assert {error.module for error in errors} == {*GROUP, "layers.0.o_proj"}
    assert {error.shape for error in errors} == {(8, 32)}


def test_write_layers_leaves_the_rest_alone(tmp_path: Path) -> None:
    tensors = source_tensors()
    found, _ = quantized(tmp_path, tensors, OutputFormat("compressed-tensors", False))
    for name in ("layers.0.q_proj.bias", "head.weight"):
        assert torch.equal(found[name], tensors[name])
    assert len(found) == 4 * 3 + 2


def test_write_layers_with_calibration(tmp_path: Path) -> None:
    amax = {module: float(i + 1) for i, module in enumerate(SELECTION.modules)}
    calibration = CalibrationResult(amax, ((4.48, 8.96),), "a text")
    output = OutputFormat("compressed-tensors", True, kv_cache_dtype="nvfp4")
    found, _ = quantized(tmp_path, source_tensors(), output, calibration)
    for module in SELECTION.modules:
        scale = found[f"{module}.input_global_scale"]
        assert float(scale) == pytest.approx(2688 / amax[module], rel=1e-6)
    assert float(found["layers.0.k_scale"]) == pytest.approx(0.01, rel=1e-6)
    assert float(found["layers.0.v_scale"]) == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "found NaN or infinity"),
        (math.inf, "found NaN or infinity"),
        (-math.inf, "found NaN or infinity"),
    ],
)
def test_write_layers_refuses_values(tmp_path: Path, value: float, message: str) -> None:
    tensors = source_tensors()
    tensors["layers.0.q_proj.weight"][3, 5] = value
    with pytest.raises(CheckpointError, match=f"^layers.0.q_proj.weight: .*{message}"):
        quantized(tmp_path, tensors, OutputFormat("modelopt", False))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float64], ids=str)
def test_write_layers_refuses_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = source_tensors()
    tensors["layers.0.o_proj.weight"] = tensors["layers.0.o_proj.weight"].to(dtype)
    with pytest.raises(CheckpointError, match=rf"^layers.0.o_proj.weight: .*found {dtype}"):
        quantized(tmp_path, tensors, OutputFormat("modelopt", False))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_written_tensors_are_vllm_s_parameters(tmp_path: Path, dialect: Dialect) -> None:
    """As `ModelOptNvFp4LinearMethod` and `CompressedTensorsW4A4Nvfp4` create them: [N, K/2] codes,
    [N, K/16] block scales, one float32 per layer for each global scale, and nothing else."""
    amax = dict.fromkeys(SELECTION.modules, 1.0)
    output = OutputFormat(dialect, True)
    found, _ = quantized(tmp_path, source_tensors(), output, CalibrationResult(amax))
    of_layer = {
        name.rpartition(".")[2]: (tensor.dtype, tuple(tensor.shape))
        for name, tensor in found.items()
        if name.startswith("layers.0.k_proj.")
    }
    if dialect == "modelopt":
        expected = {
            "weight": (torch.uint8, (8, 16)),
            "weight_scale": (torch.float8_e4m3fn, (8, 2)),
            "weight_scale_2": (torch.float32, ()),
            "input_scale": (torch.float32, ()),
        }
    else:
        expected = {
            "weight_packed": (torch.uint8, (8, 16)),
            "weight_scale": (torch.float8_e4m3fn, (8, 2)),
            "weight_global_scale": (torch.float32, (1,)),
            "input_global_scale": (torch.float32, (1,)),
        }
    assert of_layer == expected
