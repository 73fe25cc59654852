"""Experts that we write, read with ModelOpt's and compressed-tensors' own code on the CPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.folders import load_model
from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.moe import NvFp4Experts
from halfbyte.moe.separate_experts import PROJECTIONS
from halfbyte.quantization import quantize_checkpoint
from models.zoo import make_model

ARCHITECTURES = ("qwen3_moe", "mixtral")
RECIPES = ("amax6", "four_over_six")
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(params=ARCHITECTURES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_model(request.param, torch.bfloat16).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def written(source: Path, dialect: Dialect, recipe: str) -> Path:
    folder = source.parent / dialect
    quantize_checkpoint(source, folder, dialect=dialect, weights="nvfp4-a16", recipe=recipe)
    return folder


def projections(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names in the files of all projections of experts, and the values that we load."""
    model = load_model(folder, dtype="bfloat16")
    is_mixtral = model.config.model_type == "mixtral"
    for block, experts in model.named_modules():
        if not isinstance(experts, NvFp4Experts):
            continue
        stored = block.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else block
        for expert in range(experts.num_experts):
            for projection in PROJECTIONS:
                leaf = _OF_MIXTRAL[projection] if is_mixtral else projection
                values = experts.dequantize((expert, projection), torch.bfloat16)
                yield f"{stored}.{expert}.{leaf}", values


@pytest.mark.parametrize("recipe", RECIPES)
def test_compressed_tensors_reads_the_same_experts(source: Path, recipe: str) -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors").NVFP4PackedCompressor
    config = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    folder = written(source, "compressed-tensors", recipe)
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = config(**section).config_groups["group_0"]
    tensors, count = load_file(folder / "model.safetensors"), 0
    for name, ours in projections(folder):
        own = {
            part: tensors[f"{name}.{part}"]
            for part in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        theirs = compressor.decompress(own, scheme)["weight"]
        torch.testing.assert_close(ours, theirs.bfloat16(), rtol=0, atol=0)
        count += 1
    assert count == 4 * 4 * 3  # layers, experts, projections


@pytest.mark.parametrize("recipe", RECIPES)
def test_modelopt_reads_the_same_experts(source: Path, recipe: str) -> None:
    tensor_class = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    folder = written(source, "modelopt", recipe)
    tensors, count = load_file(folder / "model.safetensors"), 0
    for name, ours in projections(folder):
        codes, scales, scale = (
            tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
        )
        theirs = tensor_class(torch.Size(ours.shape), torch.bfloat16, codes).dequantize(
            dtype=torch.bfloat16, scale=scales, double_scale=scale, block_sizes={-1: 16}
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        count += 1
    assert count == 4 * 4 * 3  # layers, experts, projections
