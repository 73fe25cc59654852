import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoints.folders import declaration
from halfbyte.checkpoints import CheckpointError, Declaration, read_declaration
from halfbyte.checkpoints.dialects import modelopt
from halfbyte.checkpoints.dialects.registry import read_config
from halfbyte.checkpoints.dialects.schemes import is_fp8_input, is_nvfp4_input
from halfbyte.layouts import KVCacheDType

MLP = "model.layers.3.mlp.down_proj"
EXPERT = "model.layers.0.mlp.experts.17.gate_proj"
QUERY = "model.layers.0.self_attn.q_proj"


def read(section: dict[str, Any] | None, folder: Path = Path("/nowhere")) -> Declaration:
    result = read_declaration(folder, {"quantization_config": section})
    assert result is not None
    return result


def schemes(section: dict[str, Any]) -> list[str | None]:
    found = read(section)
    return [found.scheme_of(name) for name in (MLP, EXPERT, QUERY, "lm_head")]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4-a16"])
def test_declares_all_but_what_it_ignores(dialect: Any, scheme: Any) -> None:
    section = declaration(dialect, scheme)
    found = read(section)
    assert found.dialect == dialect
    assert found.quantize_activations == (scheme == "nvfp4")
    assert schemes(section) == [scheme, scheme, scheme, None]
    assert not found.is_ours
    assert read({**section, "provider": "halfbyte"}).is_ours


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        (["lm_head*", "model.layers.0.self_attn*"], ["nvfp4", "nvfp4", None, None]),
        (["model.layers.0.*"], ["nvfp4", None, None, "nvfp4"]),
        (["model.layers.0"], ["nvfp4", None, None, "nvfp4"]),
        (["*.mlp.experts.*", "lm_head"], ["nvfp4", None, "nvfp4", None]),
        (["model.layers.0.mlp.gate", "model.embed_tokens"], ["nvfp4"] * 4),
        ([], ["nvfp4"] * 4),
    ],
)
def test_modelopt_ignores_names_and_wildcards(ignore: list[str], expected: list[object]) -> None:
    assert schemes({**declaration("modelopt", "nvfp4"), "ignore": ignore}) == expected


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        (["lm_head", "re:.*self_attn.*"], ["nvfp4", "nvfp4", None, None]),
        (["re:.*mlp.experts"], ["nvfp4", None, "nvfp4", "nvfp4"]),
        (["re:self_attn", "self_attn", "model.layers.0"], ["nvfp4"] * 4),
        (["Linear"], [None] * 4),
        (None, ["nvfp4"] * 4),
    ],
)
def test_compressed_tensors_ignores_names_patterns_and_classes(
    ignore: list[str] | None, expected: list[object]
) -> None:
    section = {**declaration("compressed-tensors", "nvfp4"), "ignore": ignore}
    assert schemes(section) == expected


def test_compressed_tensors_takes_the_most_specific_target() -> None:
    w4a4, w4a16 = (
        declaration("compressed-tensors", scheme)["config_groups"]["group_0"]
        for scheme in ("nvfp4", "nvfp4-a16")
    )
    groups = {
        "a": {**w4a4, "targets": ["Linear"]},
        "b": {**w4a16, "targets": ["re:.*mlp.*", QUERY]},
        "c": {**w4a4, "targets": [MLP]},
        "attention": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}},
    }
    section = {**declaration("compressed-tensors"), "config_groups": groups}
    assert schemes(section) == ["nvfp4", "nvfp4-a16", "nvfp4-a16", None]


def test_compressed_tensors_presets() -> None:
    groups = {"NVFP4A16": ["re:.*self_attn.*"], "NVFP4": ["Linear"]}
    section = {**declaration("compressed-tensors"), "config_groups": groups}
    assert schemes(section) == ["nvfp4", "nvfp4", "nvfp4-a16", None]


def test_modelopt_mixed_precision() -> None:
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            MLP: {"quant_algo": "NVFP4", "group_size": 16},
            QUERY: "FP8",
            "model.layers.0.mlp.experts": {
                "quant_algo": "W4A16_NVFP4",
                "group_size": 16,
                "pre_quant_scale": False,
                "awq_block_size": None,
            },
            "lm_head": {"quant_algo": None},
        },
    }
    assert schemes(section) == ["nvfp4", "nvfp4-a16", "fp8", None]


def test_compressed_tensors_mixed_precision() -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = declaration("compressed-tensors")["config_groups"]["group_0"]
    section = {
        **declaration("compressed-tensors"),
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*self_attn.*"],
                "weights": fp8,
                "input_activations": {**fp8, "strategy": "token", "dynamic": True},
                "format": "float-quantized",
            },
            "group_1": {**group, "format": "nvfp4-pack-quantized"},
        },
    }
    assert schemes(section) == ["nvfp4-a16", "nvfp4-a16", "fp8", None]


@pytest.mark.parametrize("dynamic", [None, False, True, "local"])
def test_activations_whose_scales_are_computed_at_run_time(dynamic: object) -> None:
    """FP8 may have them or not; of NVFP4 the global scale is in the file."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": dynamic}
    nvfp4 = {**fp8, "num_bits": 4, "group_size": 16}
    assert is_fp8_input({**fp8, "strategy": "tensor"}) == (dynamic != "local")
    assert is_fp8_input({**fp8, "strategy": "token"}) == (dynamic != "local")
    assert not is_fp8_input({**fp8, "strategy": "channel"})
    assert is_nvfp4_input({**nvfp4, "strategy": "tensor_group"}) == (dynamic is not True)


def test_hf_quant_config_wins(tmp_path: Path) -> None:
    file = tmp_path / "hf_quant_config.json"
    declared = {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0*"],
    }
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": declared}))
    for section in (None, declaration("modelopt", "nvfp4")):
        found = read(section, tmp_path)
        assert found.scheme_of(MLP) == "nvfp4-a16"
        assert found.scheme_of(QUERY) is None
        assert found.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("where", ["hf_quant_config.json", "config.json"])
@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo: expected .*'FP8', found 'NVFP4'"),
        ({"group_size": 32}, "group_size: expected .*16, found 32 beside it"),
        ({"kv_cache_rotation": "hadamard"}, "kv_cache_rotation"),
        ({"rotation": "hadamard"}, "rotation: expected no such field, found 'hadamard'"),
    ],
)
def test_fields_beside_modelopts_section_count(
    tmp_path: Path, where: str, beside: dict[str, Any], message: str
) -> None:
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    fields = {"producer": {"name": "modelopt"}, "quantization": own}
    section = {"quant_method": "modelopt"}

    def read_it(fields: dict[str, Any]) -> Any:
        if where == "config.json":
            return read({**section, **fields}, tmp_path)
        (tmp_path / where).write_text(json.dumps(fields))
        return read(section, tmp_path)

    assert read_it({**fields, "kv_cache_quant_algo": "FP8"}).kv_cache_dtype == "fp8_e4m3"
    without = {name: value for name, value in own.items() if name != "kv_cache_quant_algo"}
    outside = {"producer": {}, "quantization": without, "kv_cache_quant_algo": "NVFP4"}
    assert read_it(outside).kv_cache_dtype == "nvfp4"
    with pytest.raises(CheckpointError, match=message) as error:
        read_it({**fields, **beside})
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize("algo", [None, "FP8"])
def test_hf_quant_config_wins_over_config_json_for_the_cache(
    tmp_path: Path, algo: str | None
) -> None:
    declared = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": algo, "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    copy = {**declaration("modelopt"), "provider": "somebody"}
    for declares in ({"kv_cache_scheme": "NVFP4"}, {"kv_cache_quant_algo": "NVFP4"}):
        found = read({**copy, **declares}, tmp_path)
        assert found.section is not None
        assert found.section["provider"] == "somebody"
        kept = KVCacheDType.from_checkpoint({"quantization_config": found.section})
        assert kept.value == ("auto" if algo is None else "fp8_e4m3")


@pytest.mark.parametrize("where", ["hf_quant_config.json", "config.json"])
def test_modelopt_groups_may_leave_activations_alone(tmp_path: Path, where: str) -> None:
    """The algorithm's name is that of W4A4, and the files have no `input_scale`: W4A16."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    section = {**declaration("modelopt", "nvfp4"), "config_groups": {"group_0": group}}
    if where == "hf_quant_config.json":
        declared = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        (tmp_path / where).write_text(json.dumps({"quantization": declared}))
    assert read(section, tmp_path).leaves_activations
    inputs = {**group, "input_activations": weights}
    unknown = {"input_activations": None, "targets": ["Linear"]}
    for groups in ([inputs], [group, inputs], [inputs, group]):
        section["config_groups"] = {str(i): one for i, one in enumerate(groups)}
        assert not read(section, tmp_path).leaves_activations
    assert not modelopt._leaves_activations({"config_groups": {"a": group, "b": unknown}})
    assert not modelopt._leaves_activations({"config_groups": {}})


def test_hf_quant_config_may_be_flat(tmp_path: Path) -> None:
    declared = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    found = read(None, tmp_path)
    assert [found.scheme_of(name) for name in (MLP, "lm_head")] == ["nvfp4-a16", None]


@pytest.mark.parametrize("order", [None, False, "static", "weight"])
def test_gptq_s_order_of_work_changes_nothing_in_the_files(order: object) -> None:
    assert schemes(with_weights(actorder=order))[0] == "nvfp4"


@pytest.mark.parametrize("field", [{"dynamic": True}, {"strategy": "channel"}])
def test_compressed_tensors_weights_that_are_no_nvfp4(field: dict[str, object]) -> None:
    section = declaration("compressed-tensors")
    weights = section["config_groups"]["group_0"]["weights"]
    section["config_groups"]["group_0"]["weights"] = {**weights, **field}
    with pytest.raises(CheckpointError, match=r"weights: expected NVFP4 .*not dynamic"):
        schemes(section)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"quantization": []}', '{"a": 1}'])
def test_broken_hf_quant_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: .*expected .*object"):
        read_declaration(tmp_path, {})


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({**declaration("compressed-tensors"), "kv_cache_scheme": None}, None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16},
            },
            "nvfp4",
        ),
    ],
)
def test_kv_cache_dtype(section: dict[str, Any], expected: str | None) -> None:
    found = read(section)
    assert found.kv_cache_dtype == ("fp8_e4m3" if expected == "fp8" else expected)
    if "format" not in section:
        assert found.groups == ()


@pytest.mark.parametrize(
    "section",
    [None, {}, {"quant_method": "fp8"}, {"quant_method": "quark", "global_quant_config": {}}],
)
def test_other_methods_are_not_ours(tmp_path: Path, section: dict[str, Any] | None) -> None:
    assert read_declaration(tmp_path, {"quantization_config": section}) is None


def test_quark_without_fp4_weights_is_not_ours(tmp_path: Path) -> None:
    section = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": None,
        "exclude": ["fp4_head"],
    }
    assert read_declaration(tmp_path, {"quantization_config": section}) is None


@pytest.mark.parametrize("name", ["quantization_config", "quantization"])
def test_config_whose_declaration_is_no_object(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", name: "NVFP4"}))
    with pytest.raises(CheckpointError, match=f"{name}: expected an object, found str"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", name: {"a": 1}}))
    assert read_config(tmp_path) == {"model_type": "llama", name: {"a": 1}}


@pytest.mark.parametrize(
    "extras",
    [
        {"sparsity_config": {"format": "dense"}},
        {"sparsity_config": {}, "transform_config": {}},
        {"sparsity_config": None, "transform_config": {"config_groups": {}}},
    ],
)
def test_compressed_tensors_without_sparsity_or_transforms(extras: dict[str, Any]) -> None:
    section = {**declaration("compressed-tensors", "nvfp4"), **extras}
    assert schemes(section) == ["nvfp4", "nvfp4", "nvfp4", None]


def with_group(**fields: object) -> dict[str, Any]:
    section = declaration("compressed-tensors", "nvfp4")
    section["config_groups"]["group_0"].update(fields)
    return section


def with_weights(**fields: object) -> dict[str, Any]:
    section = declaration("compressed-tensors", "nvfp4")
    section["config_groups"]["group_0"]["weights"].update(fields)
    return section


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo: .*found 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "found 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "found 'W4A8_NVFP4_FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "16, found 32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True},
            "pre_quant_scale",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {MLP: {"quant_algo": "MXFP8"}},
            },
            f"quantized_layers.*{MLP}.*found 'MXFP8'",
        ),
        *[
            (
                {
                    "quant_method": "modelopt",
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": layers,
                },
                f"quantized_layers.*: expected .*{found}",
            )
            for layers, found in [
                ({}, "found {}"),
                ([MLP], r"found \['model"),
                ({MLP: {"quant_algo": "NVFP4", "rotate": True}}, "found rotate True"),
            ]
        ],
        (
            {**declaration("modelopt"), "config_groups": [MLP]},
            "config_groups: expected an object",
        ),
        (
            {**declaration("modelopt"), "config_groups": {"a": {"output_activations": {"a": 1}}}},
            "config_groups.a.output_activations: expected none",
        ),
        (
            {**declaration("modelopt"), "config_groups": {"a": [MLP]}},
            "config_groups.a: expected an object",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT2"}, "'INT2' is not supported"),
        ({**declaration("compressed-tensors"), "format": "nvfp9"}, "format: .*found 'nvfp9'"),
        (
            {**with_group(format="nvfp4-pack-quantized"), "format": "foo"},
            "/folder: format: expected one of nvfp4-pack-quantized, .*found 'foo'",
        ),
        ({"quant_method": "compressed-tensors", "format": "sparse-24"}, "found 'sparse-24'"),
        (with_weights(num_bits=8), "weights: expected NVFP4 .*found type float, num_bits 8"),
        (with_weights(group_size=32), "found .*group_size 32"),
        (with_weights(symmetric=False), "found .*symmetric False"),
        (with_weights(actorder="group"), "found .*actorder group"),
        (with_weights(scale_dtype="torch.uint8"), "found .*scale_dtype torch.uint8"),
        (
            with_weights(num_bits=8, strategy="block"),
            "expected NVFP4 .*or FP8 per tensor or row, found .*strategy block",
        ),
        (with_group(input_activations={"type": "int", "num_bits": 8}), "input_activations"),
        (with_group(output_activations={"num_bits": 8}), "output_activations"),
        (with_group(targets="Linear"), "targets: expected a list"),
        (with_group(targets=["re:("]), "expected a regular expression"),
        (
            {**declaration("compressed-tensors"), "config_groups": {"INT4": ["Linear"]}},
            "config_groups: expected .*found 'INT4'",
        ),
        (
            {
                **declaration("compressed-tensors"),
                "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
            },
            "transform_config: expected none, found transforms u",
        ),
        (
            {**declaration("compressed-tensors"), "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config.format",
        ),
        *[
            ({**declaration("compressed-tensors"), name: [MLP]}, f"{name}: expected an object")
            for name in ("config_groups", "transform_config", "sparsity_config")
        ],
        *[
            (
                with_group(weights=None, **{"input_activations": None, name: {"num_bits": 8}}),
                f"{name}: expected null",
            )
            for name in ("input_activations", "output_activations")
        ],
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 16}},
            },
            "found 'quark' with FP4 weights",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
                "layer_quant_config": {"*down_proj": {"weight": {"dtype": "fp4"}}},
            },
            "found 'quark' with FP4 weights",
        ),
        (
            {**declaration("compressed-tensors"), "ignore": "lm_head"},
            "ignore: expected a list, found 'lm_head'",
        ),
        (
            {**declaration("modelopt"), "exclude_modules": "lm_head"},
            "exclude_modules: expected a list, found 'lm_head'",
        ),
        *[
            ({**declaration(dialect), name: value}, f"{name}: ")
            for dialect in ("modelopt", "compressed-tensors")
            for name, value in {
                "kv_cache_group_size": 32,
                "kv_cache_rotation": "hadamard",
                "kv_cache_exclude_layers": ["model.layers.0"],
                "weight_rotation": "hadamard",
                "modules_to_not_convert": ["lm_head"],
            }.items()
        ],
        ("NVFP4", "quantization_config: expected an object, found str"),
        ([], "quantization_config: expected an object, found list"),
    ],
)
def test_unknown_schemes_are_named(section: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_declaration("/some/folder", {"quantization_config": section})
    assert str(error.value).startswith("/some/folder: ")
    assert "\n" not in str(error.value)
    assert re.search("expected .*found|not supported", str(error.value))


@pytest.mark.parametrize("form", ["int-quantized", "float-quantized", "pack-quantized"])
def test_other_compressed_tensors_formats_are_the_package_s(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {**with_weights(type="int"), "format": form}
    installed = "halfbyte.checkpoints.dialects.compressed_tensors.is_installed"
    monkeypatch.setattr(installed, lambda _: True)
    assert read_declaration("/x", {"quantization_config": section}) is None
    monkeypatch.setattr(installed, lambda _: False)
    with pytest.raises(CheckpointError, match=r"weights: expected NVFP4 .*found type int"):
        read_declaration("/x", {"quantization_config": section})
