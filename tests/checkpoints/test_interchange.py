"""Checkpoints written by ModelOpt's and compressed-tensors' own code, loaded here."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.folders import load_model
from halfbyte import LLM
from halfbyte.linear import NvFp4Linear
from halfbyte.moe import NvFp4Experts
from halfbyte.moe.separate_experts import PROJECTIONS
from models.zoo import make_model, token_ids


def assert_same_values(layer: NvFp4Linear, theirs: torch.Tensor, name: str) -> None:
    """bfloat16 values equal, ties included (`numerics.nvfp4.readers_agree`)."""
    assert torch.equal(layer.dequantize(torch.bfloat16), theirs), name


def quantized_layers(model: Any) -> dict[str, NvFp4Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, NvFp4Linear)}


def dequantized_layers(model: Any) -> dict[str, torch.Tensor]:
    """bfloat16 weights by name, those of experts too."""
    found = {n: m.dequantize(torch.bfloat16) for n, m in quantized_layers(model).items()}
    for block, experts in model.named_modules():
        if isinstance(experts, NvFp4Experts):
            for expert, projection in product(range(experts.num_experts), PROJECTIONS):
                values = experts.dequantize((expert, projection), torch.bfloat16)
                found[f"{block}.{expert}.{projection}"] = values
    return found


def as_module(name: str) -> str:
    """A layer of Mixtral by its module's name."""
    name = name.replace("block_sparse_moe", "mlp").replace(".w1", ".gate_proj")
    return name.replace(".w2", ".down_proj").replace(".w3", ".up_proj")


def write_compressed(architecture: str, preset: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint with the compressed-tensors package; returns its decompressed weights."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    model = make_model(architecture, torch.bfloat16)
    config = quantization.QuantizationConfig(
        config_groups={preset: ["Linear"]}, ignore=["lm_head"], format="nvfp4-pack-quantized"
    )
    quantization.apply_quantization_config(model, config)
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    for layer in layers.values():
        weight, args = layer.weight, layer.quantization_scheme.weights
        layer.weight_global_scale.data = helpers.generate_gparam(weight.min(), weight.max())
        blocks = weight.unflatten(-1, (-1, 16))
        scales, _ = helpers.calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), args, layer.weight_global_scale
        )
        layer.weight_scale.data = scales.to(layer.weight_scale.dtype)
        if hasattr(layer, "input_global_scale"):
            layer.input_global_scale.data.fill_(300.0)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: layer.weight for name, layer in layers.items()}


@pytest.mark.parametrize(
    ("architecture", "preset", "quantize_activations"),
    [
        ("llama", "NVFP4", True),
        ("llama", "NVFP4A16", False),
        ("phi3", "NVFP4", False),
        ("qwen3_moe", "NVFP4A16", False),
    ],
)
def test_loads_what_compressed_tensors_wrote(
    tmp_path: Path, architecture: str, preset: str, quantize_activations: bool
) -> None:
    theirs = write_compressed(architecture, preset, tmp_path)
    model = load_model(tmp_path, quantize_activations=quantize_activations or None)
    layers = quantized_layers(model)
    assert set(layers) == set(theirs)
    for name, values in theirs.items():
        assert_same_values(layers[name], values, name)
        assert layers[name].quantize_activations == quantize_activations
    ids = token_ids(1, 12)
    with torch.no_grad():
        assert bool(model(ids).logits.isfinite().all())


EXPORT = """
import copy
from pathlib import Path
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file
from models.zoo import make_model, token_ids

for architecture, kind, kv_cache in (argument.split(",") for argument in sys.argv[2:]):
    model = make_model(architecture, torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    config = copy.deepcopy(getattr(mtq, kind))
    if kv_cache:
        config = update_quant_cfg_with_kv_cache_quant(config, getattr(mtq, kv_cache)["quant_cfg"])
    ids = token_ids(2, 40)
    mtq.quantize(model, config, lambda model: model(ids))
    folder = Path(sys.argv[1]) / f"{architecture}-{kind}-{kv_cache}"
    export_hf_checkpoint(model, export_dir=folder)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name, scale in tensors.items():
        if name.endswith(".weight_scale_2"):
            layer = name.removesuffix(".weight_scale_2")
            codes, scales = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
            shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
            tensor = NVFP4QTensor(shape, torch.bfloat16, codes)
            values[layer] = tensor.dequantize(
                torch.bfloat16, scale=scales, double_scale=scale, block_sizes={-1: 16}
            )
    torch.save(values, folder / "values.pt")
"""
KINDS = {
    ("llama", "NVFP4_DEFAULT_CFG", ""): 28,
    ("qwen3", "NVFP4_MLP_ONLY_CFG", "FP8_KV_CFG"): 12,
    ("qwen3_moe", "W4A16_NVFP4_CFG", "NVFP4_KV_CFG"): 64,
    ("mixtral", "W4A16_NVFP4_CFG", ""): 64,
    ("qwen2_moe", "W4A16_NVFP4_CFG", ""): 76,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by ModelOpt's exporter, in a separate process: its import patches modules."""
    pytest.importorskip("modelopt")
    pytest.importorskip("requests")  # which it needs and does not name
    folder = tmp_path_factory.mktemp("modelopt")
    tests = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.append({tests!r})\n{EXPORT}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    kinds = [",".join(kind) for kind in KINDS]
    result = subprocess.run([*command, str(folder), *kinds], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.mark.parametrize("kind", list(KINDS), ids="-".join)
def test_loads_what_modelopt_exported(exported: Path, kind: tuple[str, str, str]) -> None:
    folder = exported / "-".join(kind)
    theirs = torch.load(folder / "values.pt")
    assert len(theirs) == KINDS[kind]
    model = load_model(folder)
    layers = dequantized_layers(model)
    if kind[0] == "mixtral":  # whose files have other names than its modules
        theirs = {as_module(name): values for name, values in theirs.items()}
    assert set(layers) == set(theirs)
    for name, values in theirs.items():
        assert torch.equal(layers[name], values), name
    ids = token_ids(1, 12)
    with torch.no_grad():
        assert bool(model(ids).logits.isfinite().all())


def test_modelopts_kv_cache_is_used(exported: Path) -> None:
    folder = exported / "-".join(("qwen3_moe", "W4A16_NVFP4_CFG", "NVFP4_KV_CFG"))
    llm = LLM(load_model(folder), kv_cache_dtype="auto")
    assert llm.pool.layout(0).k_dtype == "nvfp4"
    assert llm.kv_scales is not None
    assert llm.kv_scales.source == "checkpoint (for nvfp4)"
    (folder / "hf_quant_config.json").unlink()  # config.json's copy says the same
    assert LLM(load_model(folder), kv_cache_dtype="auto").pool.layout(0).k_dtype == "nvfp4"


def test_modelopts_other_formats_are_refused_by_name(exported: Path, tmp_path: Path) -> None:
    folder = exported / "-".join(("llama", "NVFP4_DEFAULT_CFG", ""))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quant_algo: expected one of NVFP4.*found 'NVFP4_AWQ'"):
        load_model(tmp_path)
