"""Checkpoints that we write, read with ModelOpt's and compressed-tensors' own code on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints.dialects.base import OutputFormat
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE, ModelOpt
from halfbyte.linear import NvFp4Linear
from halfbyte.numerics import nvfp4
from halfbyte.quantization import quantize_checkpoint
from halfbyte.quantization.output_tensors import global_scale

RECIPES = ("amax6", "four_over_six")


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, recipe: str) -> Callable[[str], Path]:
    """The bundled model, quantized in a dialect."""
    folders: dict[str, Path] = {}

    def write(dialect: str) -> Path:
        if dialect not in folders:
            folders[dialect] = tmp_path_factory.mktemp("written") / dialect
            quantize_checkpoint(
                bundled_model_path(),
                folders[dialect],
                dialect=dialect,
                weights="nvfp4-a16",
                recipe=recipe,
            )
        return folders[dialect]

    return write


def layers_of(tensors: dict[str, torch.Tensor], suffix: str) -> list[str]:
    names = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    assert len(names) == 70
    return names


def test_compressed_tensors_reads_the_same_values(written: Callable[[str], Path]) -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors").NVFP4PackedCompressor
    config = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    folder = written("compressed-tensors")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = config(**section).config_groups["group_0"]
    tensors = load_file(folder / "model.safetensors")
    for layer in layers_of(tensors, ".weight_packed"):
        own = {
            name: tensors[f"{layer}.{name}"]
            for name in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        theirs = compressor.decompress(own, scheme)["weight"]
        ours = nvfp4.dequantize(
            own["weight_packed"],
            own["weight_scale"],
            1 / own["weight_global_scale"],
            torch.bfloat16,
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_modelopt_reads_the_same_values(written: Callable[[str], Path]) -> None:
    tensor_class = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    tensors = load_file(written("modelopt") / "model.safetensors")
    for layer in layers_of(tensors, ".weight_scale_2"):
        data, scales, scale = (
            tensors[f"{layer}.{name}"] for name in ("weight", "weight_scale", "weight_scale_2")
        )
        shape = (data.shape[0], data.shape[1] * 2)
        theirs = tensor_class(torch.Size(shape), torch.bfloat16, data).dequantize(
            dtype=torch.bfloat16, scale=scales, double_scale=scale, block_sizes={-1: 16}
        )
        ours = nvfp4.dequantize(data, scales, scale, torch.bfloat16)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_modelopt_quantizes_to_the_same_bits() -> None:
    """Its own quantizer on the same weight, with the global scale of the file."""
    tensor_class = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    weight = load_file(bundled_model_path() / "model.safetensors")[
        "model.layers.3.mlp.down_proj.weight"
    ]
    scale = global_scale(float(weight.abs().max()), "modelopt")
    theirs, scales, _ = tensor_class.quantize(
        weight.float(), 16, weights_scaling_factor_2=scale.stored
    )
    data, ours = nvfp4.quantize(weight, scale.decode)
    torch.testing.assert_close(ours.view(torch.uint8), scales.view(torch.uint8), rtol=0, atol=0)
    torch.testing.assert_close(data, theirs._quantized_data, rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["nvfp4", "nvfp4-a16"])
@pytest.mark.parametrize("kv_cache_dtype", [None, "nvfp4", "fp8_e4m3"])
def test_compressed_tensors_understands_the_declaration(
    weights: str, kv_cache_dtype: str | None
) -> None:
    theirs = pytest.importorskip("compressed_tensors.quantization")
    output = OutputFormat("compressed-tensors", weights == "nvfp4", kv_cache_dtype=kv_cache_dtype)
    config = theirs.QuantizationConfig(**CompressedTensors().config_section(output, ["lm_head"]))
    preset = theirs.preset_name_to_scheme("NVFP4" if weights == "nvfp4" else "NVFP4A16", ["Linear"])
    scheme = config.config_groups["group_0"]
    assert scheme.weights.model_dump() == preset.weights.model_dump()
    if weights == "nvfp4":
        assert scheme.input_activations.model_dump() == preset.input_activations.model_dump()
    else:
        assert scheme.input_activations is None
    assert config.ignore == ["lm_head"]
    cache = config.kv_cache_scheme
    is_fp8 = kv_cache_dtype == "fp8_e4m3"
    expected = (8, "float", "tensor", True, False) if is_fp8 else None  # vLLM refuses 4 bits
    fields = ("num_bits", "type", "strategy", "symmetric", "dynamic")
    assert (cache and tuple(getattr(cache, name) for name in fields)) == expected
    assert config.format == scheme.format == "nvfp4-pack-quantized"


def test_modelopt_makes_the_same_declaration() -> None:
    convert = pytest.importorskip(
        "modelopt.torch.export.convert_hf_config"
    ).convert_hf_quant_config_format
    for activations in (True, False):
        for kv_cache_dtype, algo in ((None, None), ("nvfp4", "NVFP4"), ("fp8_e4m3", "FP8")):
            output = OutputFormat("modelopt", activations, kv_cache_dtype=kv_cache_dtype)
            ours = ModelOpt().config_section(output, ["lm_head"])
            assert ours.pop("provider") == "halfbyte"
            assert ours.pop("kv_cache_quant_algo", None) == algo
            assert ours == convert(ModelOpt().own_files(output, ["lm_head"])[MODELOPT_FILE])


AMAXES = [mantissa / 32 for mantissa in range(128, 256)]
"""All bfloat16 significands of an amax: some give scales next to ties."""


def weight_of(amax: float) -> torch.nn.Linear:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.randn(64, 256).bfloat16().clamp(-3.9, 3.9)
    linear.weight.data[0, 0] = amax
    return linear


def test_layers_have_the_values_that_modelopt_reads() -> None:
    """For weights quantized by ModelOpt, and by us."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    for amax in AMAXES:
        linear = weight_of(amax)
        tensor, scales, global_scale = qtensor.quantize(linear.weight.data, 16)
        theirs = NvFp4Linear(256, 64, bias=False, dtype=torch.bfloat16)
        tensors = (tensor._quantized_data, scales, global_scale)
        names = ("weight", "weight_scale", "weight_scale_2")
        theirs.load_state_dict(dict(zip(names, tensors, strict=True)))
        for layer in (theirs, NvFp4Linear.from_float(linear, dialect="modelopt")):
            codes, scales, global_scale = (layer.state_dict()[name] for name in names)
            read = qtensor(torch.Size((64, 256)), torch.bfloat16, codes).dequantize(
                torch.bfloat16, scale=scales, double_scale=global_scale, block_sizes={-1: 16}
            )
            assert torch.equal(layer.dequantize(torch.bfloat16), read), amax


def test_layers_have_the_values_that_compressed_tensors_reads() -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors").NVFP4PackedCompressor
    preset = pytest.importorskip("compressed_tensors.quantization").preset_name_to_scheme
    scheme = preset("NVFP4A16", ["Linear"])
    for amax in AMAXES:
        layer = NvFp4Linear.from_float(weight_of(amax), dialect="compressed-tensors")
        read = compressor.decompress(dict(layer.state_dict()), scheme)["weight"]
        assert torch.equal(layer.dequantize(torch.bfloat16), read.bfloat16()), amax
