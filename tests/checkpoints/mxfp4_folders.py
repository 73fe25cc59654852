"""Small random checkpoints with experts in MXFP4: GPT-OSS's own, and compressed-tensors'."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from halfbyte.numerics import block_fp4
from models.zoo import make_model

SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128}


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    """Experts of a GPT-OSS to MXFP4, in place, by the names of its files."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales = block_fp4.quantize_mxfp4(tensors.pop(name).transpose(1, 2).contiguous())
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
        tensors[f"{name}_scales"] = scales


def dequantize(tensors: dict[str, torch.Tensor]) -> None:
    """The inverse, by transformers' own code."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [name for name in tensors if name.endswith("_blocks")]:
        own = name.removesuffix("_blocks")
        scales = tensors.pop(f"{own}_scales")
        values = convert_moe_packed_tensors(tensors.pop(name), scales, dtype=torch.float32)
        tensors[own] = values.contiguous()


def make_gpt_oss(folder: Path, **overrides: Any) -> Path:
    """GPT-OSS's own format. The experts' 96 features are 3 blocks, of which two ranks get 2 and 1.

    Biases are bfloat16 values: that is how vLLM keeps them.
    """
    layers = ["sliding_attention", "full_attention"]
    model = make_model("gpt_oss", **{**_SIZES, "head_dim": 64, "layer_types": layers, **overrides})
    for name, parameter in model.named_parameters():
        if "experts" in name and name.endswith("_bias"):
            parameter.data.normal_()
            parameter.data.copy_(parameter.data.bfloat16())
    out = folder / "quantized"
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    quantize(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _declare(out, SECTION)
    return out


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A Mixtral with MXFP4 experts of compressed-tensors, and one with dequantized weights."""
    plain, out = folder / "plain", folder / "quantized"
    make_model("mixtral", **_SIZES).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    packed = {}
    for name, weight in tensors.items():
        if ".experts." not in name:
            packed[name] = weight
            continue
        codes, scales = block_fp4.quantize_mxfp4(weight)
        packed |= {f"{name}_packed": codes, f"{name}_scale": scales}
        tensors[name] = block_fp4.dequantize_mxfp4(codes, scales)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, out)
    save_file(packed, out / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": True, "dynamic": False}}
    section = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "mxfp4-pack-quantized"}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*gate$"],
    }
    _declare(out, section)
    return out, plain


def _declare(folder: Path, section: dict[str, Any]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "quantization_config": section}))
