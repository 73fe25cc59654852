"""Small NVFP4 checkpoints, written from the formats' descriptions without the writer."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.checkpoints import TENSOR_NAMES, Dialect
from halfbyte.checkpoints.dialects.base import Scheme
from halfbyte.numerics import nvfp4
from models.zoo import make_model

QUANTIZED = re.compile(r"(_proj|\.w[123])\.weight$")
KV_SCALE = 0.02


@dataclass
class Folder:
    """A checkpoint with NVFP4 weights, and one with the dequantized weights."""

    quantized: Path
    plain: Path
    dialect: Dialect

    def config(self, **fields: object) -> None:
        """Change fields of `config.json`."""
        file = self.quantized / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    def declare(self, **fields: object) -> None:
        """Change fields of `quantization_config`."""
        section = json.loads((self.quantized / "config.json").read_text())["quantization_config"]
        self.config(quantization_config={**section, **fields})

    def change(self, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Edit the tensors of the only file."""
        file = self.quantized / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def load_model(path: Path, **options: Any) -> Any:
    """`halfbyte.load_model` on the CPU, where references are computed, even if there is a GPU."""
    return halfbyte.load_model(path, **{"device": "cpu", **options})


def make_folder(
    folder: Path,
    architecture: str = "qwen3",
    dialect: Dialect = "modelopt",
    scheme: Scheme = "nvfp4-a16",
    *,
    shards: int = 1,
    is_quantized: Callable[[str], bool] = lambda name: bool(QUANTIZED.search(name)),
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Folder:
    """Write a random model, quantized, and the same model with dequantized weights.

    Args:
        folder: to write both below.
        architecture: of the zoo.
        dialect: of the files.
        scheme: of the quantized layers.
        shards: number of files; tensors are distributed round-robin.
        is_quantized: which weights to quantize, by their names in the files.
        dtype: of unquantized tensors.
        overrides: of the model's config.
    """
    make_model(architecture, dtype, **overrides).save_pretrained(folder / "plain")
    return quantize_folder(folder, dialect, scheme, shards, is_quantized)


def quantize_folder(
    folder: Path,
    dialect: Dialect,
    scheme: Scheme = "nvfp4-a16",
    shards: int = 1,
    is_quantized: Callable[[str], bool] = lambda name: bool(QUANTIZED.search(name)),
) -> Folder:
    """Write `quantized` from `plain`, and replace the weights of `plain` by dequantized ones."""
    result = Folder(folder / "quantized", folder / "plain", dialect)
    weights = load_file(result.plain / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if is_quantized(name):
            packed = pack(weight, dialect, scheme)
            tensors |= {name.removesuffix("weight") + key: value for key, value in packed.items()}
            weights[name] = unpack(packed, dialect, weight.dtype)
        else:
            tensors[name] = weight
    save_file(weights, result.plain / "model.safetensors", metadata={"format": "pt"})
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(result.plain, result.quantized, ignore=ignored)
    _save(tensors, result.quantized, shards)
    fields = json.loads((result.plain / "config.json").read_text())
    section = declaration(dialect, scheme)
    fields["quantization_config"] = section
    (result.quantized / "config.json").write_text(json.dumps(fields))
    return result


def make_mixed_folder(folder: Path, dialect: Dialect, *, per_row: bool = False) -> Folder:
    """A checkpoint with NVFP4 in its MLPs and FP8 in its attention."""
    result = make_folder(folder, dialect=dialect, is_quantized=lambda name: ".mlp." in name)
    plain, quantized = (
        load_file(path / "model.safetensors") for path in (result.plain, result.quantized)
    )
    attention = [name for name in plain if "self_attn" in name and QUANTIZED.search(name)]
    for name in attention:
        amax = plain[name].abs().amax(1, keepdim=True) if per_row else plain[name].abs().amax()
        scale = amax / 448
        weight = (plain[name] / scale).to(torch.float8_e4m3fn)
        quantized |= {name: weight, f"{name}_scale": scale}
        plain[name] = weight.float() * scale
    for path, tensors in ((result.plain, plain), (result.quantized, quantized)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if dialect == "modelopt":
        mlp = [f"model.layers.{i}.mlp.{p}_proj" for i in range(4) for p in ("gate", "up", "down")]
        fp8_names = [name.removesuffix(".weight") for name in attention]
        result.declare(
            quant_algo="MIXED_PRECISION",
            quantized_layers={
                **{name: {"quant_algo": "FP8"} for name in fp8_names},
                **{name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in mlp},
            },
        )
        return result
    strategy = "channel" if per_row else "tensor"
    fp8 = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    nvfp4_group = declaration(dialect)["config_groups"]["group_0"]
    groups = {
        "group_0": {**nvfp4_group, "format": "nvfp4-pack-quantized"},
        "group_1": {"weights": fp8, "targets": ["re:.*self_attn.*"], "format": "float-quantized"},
    }
    result.declare(format="mixed-precision", config_groups=groups)
    return result


def pack(
    weight: torch.Tensor, dialect: Dialect, scheme: Scheme = "nvfp4-a16"
) -> dict[str, torch.Tensor]:
    """A layer's tensors, by their names without the layer's."""
    names = TENSOR_NAMES[dialect]
    if dialect == "modelopt":
        stored = decode = nvfp4.global_scale_from_amax(weight.abs().amax().float())
        activations = torch.tensor(0.003)
    else:
        stored = (2688 / weight.abs().amax().float()).reshape(1)
        decode = 1 / stored
        activations = torch.tensor([300.0])
    codes, scales = nvfp4.quantize(weight, decode)
    packed = {names.weight: codes, names.weight_scale: scales, names.weight_global_scale: stored}
    if scheme == "nvfp4":
        packed[names.input_global_scale] = activations
    return packed


def unpack(
    packed: dict[str, torch.Tensor], dialect: Dialect, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A layer's dequantized weight."""
    names = TENSOR_NAMES[dialect]
    decode = packed[names.weight_global_scale].reshape(())
    decode = decode if names.global_scale_is_decode else 1 / decode
    return nvfp4.dequantize(packed[names.weight], packed[names.weight_scale], decode, dtype)


def declaration(dialect: Dialect, scheme: Scheme = "nvfp4-a16") -> dict[str, Any]:
    """`quantization_config` as the tools of a dialect write it, shortened."""
    if dialect == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if scheme == "nvfp4" else "W4A16_NVFP4",
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
    }
    inputs = {**weights, "dynamic": "local"} if scheme == "nvfp4" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _save(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
