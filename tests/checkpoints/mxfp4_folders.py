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


def make_mxfp4(
    folder: Path, architecture: str = "mixtral", *, all_layers: bool = False
) -> tuple[Path, Path]:
    """A model with MXFP4 experts of compressed-tensors, and one with dequantized weights.

    Args:
        folder: to write both below.
        architecture: a mixture of the zoo.
        all_layers: quantize attention's linear layers as well.
    """
    plain, out = folder / "plain", folder / "quantized"
    sizes = dict(_SIZES)
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = 96
    if architecture == "gpt_oss":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    make_model(architecture, **sizes).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    packed = _separate(tensors) if architecture == "gpt_oss" else dict(tensors)
    for name, weight in list(packed.items()):
        is_wanted = ".experts." in name or (all_layers and ".self_attn." in name)
        if not is_wanted or weight.dim() != 2:
            continue
        codes, scales = block_fp4.quantize_mxfp4(packed.pop(name))
        packed |= {f"{name}_packed": codes, f"{name}_scale": scales}
        values = block_fp4.dequantize_mxfp4(codes, scales)
        if architecture == "gpt_oss" and ".experts." in name:
            _put(tensors, name, values)
        else:
            tensors[name] = values
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
        "ignore": ["lm_head", "re:.*gate$", *([] if all_layers else ["re:.*self_attn.*"])],
    }
    _declare(out, section)
    return out, plain


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-OSS's tensors with those of experts by expert and projection."""
    result = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            result[name] = tensor
            continue
        block, _, own = name.rpartition(".")
        kind = "bias" if own.endswith("_bias") else "weight"
        for expert, matrix in enumerate(tensor):
            rows = matrix if kind == "bias" else matrix.T
            parts = {"down_proj": rows}
            if own.startswith("gate_up"):
                parts = {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            for projection, part in parts.items():
                result[f"{block}.{expert}.{projection}.{kind}"] = part.contiguous()
    return result


def _put(tensors: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Put an expert's weight into GPT-OSS's tensors, which `_separate` separates."""
    block, expert, projection, _ = name.rsplit(".", 3)
    if projection == "down_proj":
        tensors[f"{block}.down_proj"][int(expert)] = values.T
    else:
        columns = slice(0 if projection == "gate_proj" else 1, None, 2)
        tensors[f"{block}.gate_up_proj"][int(expert), :, columns] = values.T


def _declare(folder: Path, section: dict[str, Any]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "quantization_config": section}))
