"""`KVCacheDType`: names, properties, and what checkpoints declare."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from halfbyte.layouts import KVCacheDType, formats
from kvcache.page_arithmetic import ALIASES, DTYPES, QUANTIZED, WITH_GLOBAL_SCALE

NAMES = ["auto", *DTYPES]


def test_members() -> None:
    assert [member.value for member in KVCacheDType] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_parse_names(name: str) -> None:
    member = KVCacheDType.parse(name)
    assert member.value == name == str(member) == f"{member}"
    assert KVCacheDType.parse(member) is member


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_parse_aliases(alias: str, name: str) -> None:
    assert KVCacheDType.parse(alias) is KVCacheDType(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parse_torch_dtypes(dtype: torch.dtype) -> None:
    assert KVCacheDType.parse(dtype).storage_dtype == dtype


@pytest.mark.parametrize("name", ["int8", "", "NVFP4", "fp4", "torch.bfloat16", torch.int8, None])
def test_parse_unknown_lists_the_valid_names(name: Any) -> None:
    with pytest.raises(ValueError, match="expected one of") as error:
        KVCacheDType.parse(name)
    for valid in [*NAMES, *ALIASES]:
        assert valid in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_is_quantized_and_is_nvfp4(name: str) -> None:
    member = KVCacheDType.parse(name)
    assert member.is_quantized == (name in QUANTIZED)
    assert member.is_nvfp4 == (name in ("nvfp4", "nvfp4_4over6"))
    assert member.has_global_scale == (name in WITH_GLOBAL_SCALE)


@pytest.mark.parametrize("name", NAMES[1:])
def test_storage_dtype(name: str) -> None:
    expected = torch.uint8 if name in QUANTIZED else getattr(torch, name)
    assert KVCacheDType.parse(name).storage_dtype == expected


def test_member_without_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(formats.KV_FORMATS, "mxfp4")
    with pytest.raises(ValueError, match="'mxfp4' has no row in `KV_FORMATS`"):
        KVCacheDType.MXFP4.data_bytes(64)


def test_storage_dtype_of_auto_is_an_error() -> None:
    with pytest.raises(ValueError, match="auto"):
        _ = KVCacheDType.AUTO.storage_dtype


@pytest.mark.parametrize(
    ("name", "data", "scales"),
    [
        ("float32", 256, 0),
        ("float16", 128, 0),
        ("bfloat16", 128, 0),
        ("fp8", 64, 0),
        ("fp8_e5m2", 64, 0),
        ("nvfp4", 32, 4),
        ("nvfp4_4over6", 32, 4),
        ("fp4_block16", 32, 4),
        ("mxfp4", 32, 2),
    ],
)
def test_bytes_of_a_head_of_64(name: str, data: int, scales: int) -> None:
    member = KVCacheDType.parse(name)
    assert (member.data_bytes(64), member.scale_bytes(64)) == (data, scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_resolve(name: str, model_dtype: torch.dtype) -> None:
    resolved = KVCacheDType.parse(name).resolve(model_dtype)
    expected = str(model_dtype).removeprefix("torch.") if name == "auto" else name
    assert resolved.value == expected


def modelopt(algo: str | None) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": algo,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }


def compressed_tensors(**scheme: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": scheme or None,
        },
    }


EIGHT_BITS = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
FOUR_BITS = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}

DECLARATIONS = {
    "modelopt-fp8": (modelopt("FP8"), "fp8_e4m3"),
    "modelopt-nvfp4": (modelopt("NVFP4"), "nvfp4"),
    "modelopt-none": (modelopt(None), "auto"),
    "modelopt-none-string": (modelopt("None"), "auto"),
    "modelopt-in-config": (
        {"dtype": "float16", "quantization_config": {"kv_cache_quant_algo": "FP8"}},
        "fp8_e4m3",
    ),
    "modelopt-in-config-nested": (
        {"dtype": "float16", "quantization_config": modelopt("NVFP4")},
        "nvfp4",
    ),
    "modelopt-in-config-none": (
        {"dtype": "float16", "quantization_config": modelopt(None)},
        "float16",
    ),
    "modelopt-in-config-scheme": (
        {
            "dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
        },
        "fp8_e4m3",
    ),
    "bare-quantization-config": ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    "compressed-tensors-8-bits": (compressed_tensors(**EIGHT_BITS), "fp8_e4m3"),
    "compressed-tensors-4-bits": (compressed_tensors(**FOUR_BITS), "nvfp4"),
    "compressed-tensors-none": (compressed_tensors(), "bfloat16"),
    "unquantized-dtype": ({"dtype": "float16"}, "float16"),
    "unquantized-torch-dtype": ({"torch_dtype": "bfloat16"}, "bfloat16"),
    "unquantized-both": ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
    "unquantized-torch-object": ({"dtype": torch.bfloat16}, "bfloat16"),
    "quantization-config-null": ({"dtype": "float16", "quantization_config": None}, "float16"),
    "weights-alone": (
        {"dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4}},
        "float16",
    ),
    "text-config": (
        {"text_config": {"quantization_config": {"kv_cache_quant_algo": "FP8"}}},
        "fp8_e4m3",
    ),
    "empty": ({}, "auto"),
}


@pytest.mark.parametrize(("config", "name"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_from_checkpoint(config: dict[str, Any], name: str) -> None:
    assert KVCacheDType.from_checkpoint(config).value == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "auto"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": torch.float16}, "float16"),
        ({"quantization_config": modelopt("NVFP4")["quantization"]}, "nvfp4"),
        ({"quantization_config": modelopt("FP8")}, "fp8_e4m3"),
        (
            {"quantization_config": compressed_tensors(**EIGHT_BITS)["quantization_config"]},
            "fp8_e4m3",
        ),
    ],
    ids=["bare", "bfloat16", "float16", "modelopt-nvfp4", "modelopt-fp8", "compressed-tensors"],
)
def test_from_checkpoint_of_transformers_configs(fields: dict[str, Any], name: str) -> None:
    config = Qwen3Config(num_hidden_layers=1, hidden_size=64, **fields)
    assert KVCacheDType.from_checkpoint(config).value == name


class Declaration:
    """A quantization config as an object, as transformers makes for methods that it knows."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def test_from_checkpoint_of_a_quantization_config_object() -> None:
    config = {"quantization_config": Declaration({"kv_cache_scheme": EIGHT_BITS})}
    assert KVCacheDType.from_checkpoint(config) is KVCacheDType.FP8_E4M3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (modelopt("INT8"), "INT8"),
        (modelopt("NVFP4_AFFINE"), "FP8, NVFP4"),
        (compressed_tensors(type="int", num_bits=8), "int"),
        (compressed_tensors(type="float", num_bits=4, group_size=32), "32"),
        (compressed_tensors(type="float", num_bits=16), "16"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
    ids=["int8", "affine", "int-scheme", "groups-of-32", "16-bits", "dtype"],
)
def test_from_checkpoint_refuses_formats_that_do_not_exist_here(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheDType.from_checkpoint(config)


def test_from_checkpoint_refuses_what_is_not_a_config() -> None:
    with pytest.raises(TypeError, match="config"):
        KVCacheDType.from_checkpoint(3)
