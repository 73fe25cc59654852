"""Small random checkpoints with 4-bit experts."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from checkpoints.folders import make_folder
from halfbyte.checkpoints import Dialect
from halfbyte.checkpoints.dialects.base import Scheme
from halfbyte.numerics import block_fp4
from models.nvfp4.test_mxfp4_experts import SECTION, quantize
from models.zoo import make_model

_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128}


def make_nvfp4(folder: Path, architecture: str, dialect: Dialect, scheme: Scheme) -> Path:
    """NVFP4 in all layers but the routers; gate and up of an expert have their own global scales.

    The experts' 96 features are 48 for each of two ranks.
    """
    sizes = _SIZES | ({"moe_intermediate_size": 96} if architecture.startswith("qwen") else {})
    result = make_folder(folder, architecture, dialect, scheme, **sizes)
    result.declare(ignore=["lm_head", "*gate" if dialect == "modelopt" else "re:.*gate$"])
    return result.quantized


def make_gpt_oss(folder: Path) -> Path:
    """GPT-OSS's own format. The experts' 96 features are 3 blocks, of which two ranks get 2 and 1.

    Biases are bfloat16 values: that is how vLLM keeps them.
    """
    model = make_model(
        "gpt_oss", **_SIZES, head_dim=64, layer_types=["sliding_attention", "full_attention"]
    )
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
