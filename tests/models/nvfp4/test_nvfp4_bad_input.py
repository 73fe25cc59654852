"""Broken checkpoints: one line that names the tensor, what was expected and what was found."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.folders import Folder, load_model, make_folder, pack
from halfbyte.checkpoints import DIALECTS, TENSOR_NAMES, CheckpointError, Dialect
from halfbyte.checkpoints.dialects.base import Scheme
from halfbyte.models import ModelLoadError

LAYER = "model.layers.2.mlp.gate_proj"


@pytest.fixture
def folder(tmp_path: Path, dialect: Dialect) -> Folder:
    return make_folder(tmp_path, dialect=dialect, scheme="nvfp4")


def refuses(folder: Folder, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folder.quantized)
    assert "\n" not in str(error.value)
    assert str(folder.quantized) in str(error.value)


@pytest.mark.parametrize(
    "role", ["weight", "weight_scale", "weight_global_scale", "input_global_scale"]
)
def test_missing(folder: Folder, role: str) -> None:
    name = f"{LAYER}.{getattr(TENSOR_NAMES[folder.dialect], role)}"
    folder.change(lambda tensors: tensors.pop(name))
    refuses(folder, rf"{name}: expected \w+ \[.*\], found no such tensor")


@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_global_scale"])
def test_wrong_shape(folder: Folder, role: str) -> None:
    name = f"{LAYER}.{getattr(TENSOR_NAMES[folder.dialect], role)}"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].reshape(-1).view(torch.uint8).repeat(2)

    folder.change(widen)
    refuses(folder, rf"{name}: expected \w+ \[.*\], found U8 \[\d+\]")


@pytest.mark.parametrize(
    ("role", "dtype"),
    [("weight", "int16"), ("weight_scale", "bfloat16"), ("weight_global_scale", "int32")],
)
def test_wrong_dtype(folder: Folder, role: str, dtype: str) -> None:
    name = f"{LAYER}.{getattr(TENSOR_NAMES[folder.dialect], role)}"

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].float().to(getattr(torch, dtype))

    folder.change(convert)
    refuses(folder, rf"{name}: expected \w+ \[.*\], found (I16|BF16|I32) \[")


@pytest.mark.parametrize("value", [float("nan"), -1.0, -0.0])
def test_block_scales_that_cannot_be(folder: Folder, value: float) -> None:
    name = f"{LAYER}.weight_scale"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[name].float()
        scales[3, 1] = value
        tensors[name] = scales.to(torch.float8_e4m3fn)

    folder.change(spoil)
    refuses(folder, f"{name}: expected finite block scales without a sign, found {value}")


@pytest.mark.parametrize("role", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [float("nan"), 0.0, -0.5, float("inf")])
def test_global_scales_that_cannot_be(folder: Folder, role: str, value: float) -> None:
    name = f"{LAYER}.{getattr(TENSOR_NAMES[folder.dialect], role)}"
    folder.change(lambda tensors: tensors[name].fill_(value))
    refuses(folder, f"{name}: expected a finite number above 0, found {value}")


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_kv_scales_that_cannot_be(folder: Folder, value: float) -> None:
    attention = "model.layers.1.self_attn"
    names = {
        "modelopt": (f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"),
        "compressed-tensors": (f"{attention}.k_scale", f"{attention}.v_scale"),
    }[folder.dialect]
    scales = dict(zip(names, (torch.tensor(value), torch.tensor(0.5)), strict=True))
    folder.change(lambda tensors: tensors.update(scales))
    refuses(folder, f"{names[0]}: expected a finite number above 0, found {value}")


@pytest.mark.parametrize("extra", ["pre_quant_scale", "weight_zero_point", "svdquant_lora_a"])
def test_a_tensor_that_would_be_ignored(folder: Folder, extra: str) -> None:
    name = f"{LAYER}.{extra}"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(64)

    folder.change(add)
    refuses(folder, rf"{name}: expected no such tensor .*, found F32 \[64\]")


def test_quantized_but_not_declared(folder: Folder) -> None:
    folder.declare(ignore=["lm_head", LAYER])
    packed = TENSOR_NAMES[folder.dialect].weight
    is_weight = packed == "weight"
    expected = (
        r"BF16/F16/F32 \[96, 64\]" if is_weight else "no tensor of quantized weights in this layer"
    )
    left_out = "as the declaration leaves the layer out"
    refuses(folder, rf"{LAYER}.{packed}: expected {expected}, {left_out}, found U8 \[96, 32\]")


def test_scales_beside_a_plain_weight(folder: Folder) -> None:
    folder.declare(ignore=["lm_head", LAYER])

    def make_plain(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.weight"] = torch.ones(96, 64)

    folder.change(make_plain)
    refuses(folder, rf"{LAYER}.\w+: expected no tensor of quantized weights in this layer")


def test_missing_plain_weight(folder: Folder) -> None:
    folder.change(lambda tensors: tensors.pop("model.norm.weight"))
    refuses(folder, r"model.norm.weight: expected .* \[64\], found no such tensor")


def test_wrong_plain_shape(folder: Folder) -> None:
    folder.config(vocab_size=140)
    refuses(folder, r"embed_tokens.weight: expected .* \[140, 64\], found F32 \[131, 64\]")


def test_the_other_dialect_s_tensors(tmp_path: Path, folder: Folder) -> None:
    other = next(d for d in DIALECTS if d != folder.dialect)
    twin = make_folder(tmp_path / "twin", dialect=other, scheme="nvfp4")
    save_file(
        load_file(twin.quantized / "model.safetensors"), folder.quantized / "model.safetensors"
    )
    refuses(folder, r"expected (U8|F32) \[.*found no such tensor")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.rename(file.with_name("pytorch_model.bin")),
    ],
    ids=["truncated", "pickled"],
)
def test_broken_files(folder: Folder, damage: Callable[[Path], object]) -> None:
    damage(folder.quantized / "model.safetensors")
    refuses(folder, r"found (SafetensorError|pickled weights \(pytorch_model.bin\))")


def test_absent_shard(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, dialect=dialect, shards=3)
    (folder.quantized / "model-00002-of-00003.safetensors").unlink()
    refuses(folder, "expected the shard model-00002-of-00003.*found no such file")


def test_unknown_scheme(folder: Folder) -> None:
    folder.declare(quant_algo="NVFP5", format="nvfp5-pack")
    refuses(folder, "(quant_algo|format): expected .*found '(NVFP5|nvfp5-pack)'")


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4-a16"])
def test_declared_nowhere(tmp_path: Path, dialect: Dialect, scheme: Scheme) -> None:
    folder = make_folder(tmp_path, dialect=dialect, scheme=scheme)
    folder.config(quantization_config=None)
    refuses(
        folder,
        r"found quantized weights \(tensor model.layers.\d.\S+\), expected a declaration in "
        r"config.json or hf_quant_config.json$",
    )


@pytest.mark.parametrize("section", [[], [{"quant_method": "modelopt"}], "NVFP4", 4])
def test_a_declaration_that_is_no_object(folder: Folder, section: object) -> None:
    folder.config(quantization_config=section)
    found = type(section).__name__
    refuses(folder, f"quantization_config: expected an object, found {found}$")


@pytest.mark.parametrize(
    ("content", "found"), [("{", "Expecting"), ("[]", "list"), ("\xff", "invalid")]
)
def test_a_config_that_is_no_json_object(folder: Folder, content: str, found: str) -> None:
    (folder.quantized / "config.json").write_bytes(content.encode("latin-1"))
    refuses(folder, f"config.json: expected a JSON object, found .*{found}")


def test_unknown_method(folder: Folder) -> None:
    folder.declare(quant_method="mystery")
    with pytest.raises(ModelLoadError, match=r"quant_method: expected .*found 'mystery'"):
        load_model(folder.quantized)


def test_input_features_that_nvfp4_cannot_have(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(
        tmp_path, dialect=dialect, intermediate_size=100, is_quantized=lambda name: False
    )
    name = "model.layers.0.mlp.down_proj"

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{name}.weight"]
        packed = pack(torch.randn(64, 112), dialect)
        tensors.update({f"{name}.{key}": value for key, value in packed.items()})

    folder.change(quantize)
    refuses(folder, rf"{name}: expected input features in multiples of 16.*found 100")
