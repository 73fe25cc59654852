"""Every field of a cache's declaration that changes numbers is honoured or refused."""

from typing import Any

import pytest

from halfbyte.layouts import KVCacheDType
from halfbyte.layouts.kv_declarations import format_of_scheme, read_declared_cache

FP8 = {"type": "float", "num_bits": 8}
NVFP4 = {"type": "float", "num_bits": 4, "group_size": 16}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (FP8, "fp8_e4m3"),
        ({"type": "FLOAT"}, "fp8_e4m3"),
        ({**FP8, "strategy": "tensor", "symmetric": True, "dynamic": False}, "fp8_e4m3"),
        ({**FP8, "group_size": None, "block_structure": None, "actorder": None}, "fp8_e4m3"),
        ({**FP8, "observer": "minmax", "observer_kwargs": {"x": 1}}, "fp8_e4m3"),
        ({**FP8, "scale_dtype": "torch.bfloat16", "zp_dtype": None}, "fp8_e4m3"),
        (NVFP4, "nvfp4"),
        ({**NVFP4, "strategy": "tensor_group", "dynamic": "local"}, "nvfp4"),
        ({**NVFP4, "scale_dtype": "torch.float8_e4m3fn"}, "nvfp4"),
    ],
)
def test_schemes_that_are_read(scheme: dict[str, Any], expected: str) -> None:
    assert format_of_scheme(scheme) == expected


@pytest.mark.parametrize(
    ("scheme", "field"),
    [
        ({"num_bits": 8}, "type"),  # whose default is int
        ({**FP8, "type": "int"}, "type"),
        ({**FP8, "num_bits": 6}, "num_bits"),
        ({**FP8, "num_bits": "8"}, "num_bits"),
        ({**FP8, "symmetric": False}, "symmetric"),
        ({**FP8, "symmetric": None}, "symmetric"),
        ({**FP8, "strategy": "channel"}, "strategy"),
        ({**FP8, "strategy": "attn_head"}, "strategy"),
        ({**FP8, "strategy": "token"}, "strategy"),
        ({**FP8, "group_size": 16}, "group_size"),
        ({**FP8, "dynamic": True}, "dynamic"),
        ({**FP8, "dynamic": "local"}, "dynamic"),
        ({**FP8, "scale_dtype": "torch.uint8"}, "scale_dtype"),
        ({**FP8, "block_structure": [1, 16]}, "block_structure"),
        ({**FP8, "zero_point": 7}, "zero_point"),
        ({**NVFP4, "group_size": 32}, "group_size"),
        ({**NVFP4, "group_size": None, "strategy": "tensor_group"}, "group_size"),
        ({**NVFP4, "strategy": "group"}, "strategy"),
        ({**NVFP4, "strategy": "tensor"}, "strategy"),
        ({**NVFP4, "dynamic": True}, "dynamic"),
        ({**NVFP4, "symmetric": False}, "symmetric"),
        ({**NVFP4, "scale_dtype": "torch.float32"}, "scale_dtype"),
        ({**NVFP4, "scale_dtype": "torch.uint8"}, "scale_dtype"),
    ],
)
def test_schemes_that_are_refused_by_the_field(scheme: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_scheme: {field} .*not supported; expected"):
        format_of_scheme(scheme)
    with pytest.raises(ValueError, match=field):
        KVCacheDType.from_checkpoint({"quantization_config": {"kv_cache_scheme": scheme}})


def quark(**fields: object) -> dict[str, Any]:
    """Quark's description of the cache."""
    own = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, **fields}
    return {name: {"output_tensors": own, "weight": {}} for name in ("*k_proj", "*v_proj")}


def layers(**algos: object) -> dict[str, Any]:
    return {f"model.layers.{name[1:]}.self_attn": {"quant_algo": x} for name, x in algos.items()}


@pytest.mark.parametrize("dynamic", [None, False, "local"])
def test_block_scales_may_be_computed_at_run_time(dynamic: object) -> None:
    assert format_of_scheme({**NVFP4, "dynamic": dynamic}) == "nvfp4"


def test_formats_per_layer() -> None:
    section = {
        "kv_cache_quant_algo": "MIXED_PRECISION",
        "kv_cache_quantized_layers": layers(
            _0="FP8", _1="none", _2="NVFP4", _3="FP8_K_NVFP4_V", _4=None
        ),
        "kv_cache_schema_version": 1,
    }
    config = {"dtype": "bfloat16", "quantization_config": section}
    found = KVCacheDType.layers_from_checkpoint(config, 5)
    assert [(k.value, v.value) for k, v in found] == [
        ("fp8_e4m3", "fp8_e4m3"),
        ("bfloat16", "bfloat16"),
        ("nvfp4", "nvfp4"),
        ("fp8_e4m3", "nvfp4"),
        ("bfloat16", "bfloat16"),
    ]
    with pytest.raises(ValueError, match="different formats"):
        KVCacheDType.from_checkpoint(config)
    with pytest.raises(ValueError, match="has layer 3, the model has 3"):
        KVCacheDType.layers_from_checkpoint(config, 3)


def test_one_format_for_some_layers_and_for_all() -> None:
    some = {"kv_cache_quant_algo": "FP8", "kv_cache_quantized_layers": layers(_1="FP8")}
    found = KVCacheDType.layers_from_checkpoint({"dtype": "float16", **some}, 2)
    assert [k.value for k, _ in found] == ["float16", "fp8_e4m3"]
    assert KVCacheDType.from_checkpoint(some).value == "fp8_e4m3"
    found = KVCacheDType.layers_from_checkpoint({"kv_cache_quant_algo": "FP8_K_NVFP4_V"}, 2)
    assert [(k.value, v.value) for k, v in found] == [("fp8_e4m3", "nvfp4")] * 2
    none = {"kv_cache_quant_algo": "None", "kv_cache_scheme": None}

    assert KVCacheDType.from_checkpoint(none).value == "auto"
    found = KVCacheDType.layers_from_checkpoint({"dtype": "float16", **none}, 2)
    assert [(k.value, v.value) for k, v in found] == [("float16", "float16")] * 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kv_cache_quant_algo": "NVFP4", "kv_cache_scheme": FP8}, "kv_cache_scheme: expected wh"),
        ({"kv_cache_quant_algo": "MIXED_PRECISION"}, "without kv_cache_quantized_layers"),
        ({"kv_cache_quant_algo": 8}, "expected a name or an object"),
        ({"kv_cache_scheme": [FP8]}, "expected a name or an object"),
        ({"kv_cache_quantized_layers": [1]}, "expected an object of layers"),
        ({"kv_cache_quantized_layers": layers(_0="INT8")}, "'INT8' is not supported"),
        ({"kv_cache_quantized_layers": layers(_0="MIXED_PRECISION")}, "expected one format"),
        ({"kv_cache_scheme": {**NVFP4, "dynamic": True}}, "kv_cache_scheme: dynamic True"),
        ({"kv_cache_quantized_layers": {"lm_head": "FP8"}}, "expected the names of attention"),
        (
            {"kv_cache_quant_algo": "FP8", "kv_cache_quantized_layers": layers(_0="NVFP4")},
            "expected FP8 in every layer",
        ),
        (
            {
                "kv_cache_quantized_layers": {
                    "model.layers.0.self_attn": {"quant_algo": "NVFP4", "group_size": 32}
                }
            },
            "'group_size': 32",
        ),
        (
            {"kv_cache_quantized_layers": layers(_0="FP8"), "kv_cache_schema_version": 2},
            "kv_cache_schema_version: 2",
        ),
        ({"kv_cache_quant_algo": "FP8", "kv_cache_schema_version": 2}, "schema_version: 2"),
        *[
            ({"kv_cache_quant_algo": "FP8", name: value}, f"{name}: .*not supported")
            for name, value in {
                "kv_cache_group_size": 32,
                "kv_cache_dynamic": True,
                "kv_cache_rotation": "hadamard",
                "kv_cache_exclude_layers": ["model.layers.0"],
                "kv_cache_anything": 0.5,
            }.items()
        ],
        ({"kv_cache_rotation": "hadamard"}, "kv_cache_rotation: 'hadamard'"),
        ({"kv_cache_scheme": "static"}, "'static' is not supported"),
        ({"kv_cache_quant_config": ["*k_proj"]}, "kv_cache_quant_config: "),
        ({"kv_cache_quant_config": {"*k_proj": None}}, "expected fp8_e4m3 per_tensor"),
        *[
            ({"kv_cache_quant_config": quark(**{name: x})}, f"'{name}': '?{x}'?.* not supported")
            for name, x in {
                "dtype": "int8",
                "qscheme": "per_channel",
                "is_dynamic": True,
            }.items()
        ],
    ],
)
def test_declarations_that_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_declared_cache(section)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_fields_that_are_not_set_are_none(value: object) -> None:
    section = {"kv_cache_quant_algo": "FP8", "kv_cache_rotation": value}
    assert read_declared_cache(section) == read_declared_cache({"kv_cache_quant_algo": "FP8"})


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "quark", "kv_cache_quant_config": quark()},
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
    ],
    ids=["Quark", "AutoFP8"],
)
def test_declarations_of_other_methods(section: dict[str, Any]) -> None:
    assert KVCacheDType.from_checkpoint({"quantization_config": section}) == "fp8_e4m3"
    assert read_declared_cache({"quant_method": "quark", "kv_cache_quant_config": {}}) is None


def test_a_model_s_own_fields_are_none_of_the_declaration() -> None:
    config = {"model_type": "llama", "kv_cache_heads": 8, "quantization_config": None}
    assert KVCacheDType.from_checkpoint(config) == "auto"


@pytest.mark.parametrize("name", ["kv_cache_quant_algo", "kv_cache_scheme"])
def test_sections_that_contradict_each_other(name: str) -> None:
    section = {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}
    with pytest.raises(ValueError, match="two that differ: nvfp4 and fp8_e4m3"):
        KVCacheDType.from_checkpoint({**section, name: "FP8"})
    assert KVCacheDType.from_checkpoint({**section, name: "NVFP4"}) == "nvfp4"
    nested = {"quantization": {"kv_cache_quant_algo": "NVFP4"}, name: "FP8"}
    with pytest.raises(ValueError, match="two that differ"):
        KVCacheDType.from_checkpoint({"quantization_config": nested})
