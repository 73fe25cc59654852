import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import StableLmConfig, StableLmForCausalLM

from halfbyte.assets import bundled_model_path
from halfbyte.engine import LLM
from halfbyte.models import (
    ENGINE,
    Cache,
    ModelLoadError,
    UnsupportedModelError,
    load_model,
    load_tokenizer,
    local_files,
    register,
)
from models.zoo import make_model, token_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_load_model(folder: Path) -> None:
    model = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert load_model(folder, dtype="float32").dtype == torch.float32


def corrupt(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "no-weights":
        weights.unlink()
    elif how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "absent-shard":
        weights.rename(folder / "model-00001-of-00002.safetensors")
        shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        weight_map = {"model.embed_tokens.weight": shards[0], "model.norm.weight": shards[1]}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif how == "no-config":
        config.unlink()
    elif how == "config-not-json":
        config.write_text("{")
    elif how == "other-shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 128}))
    elif how == "more-layers":
        fields = json.loads(config.read_text())
        fields["num_hidden_layers"] = 5
        fields["layer_types"] = ["full_attention"] * 5
        config.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "expected a whole safetensors file"),
        ("empty", "expected a whole safetensors file"),
        ("no-weights", "expected model.safetensors or model.safetensors.index.json, found neither"),
        ("pickled", r"found pickled weights \(pytorch_model.bin\)"),
        ("absent-shard", "expected the shard model-00002-of-00002.safetensors"),
        ("no-config", r"config\.json"),
        ("config-not-json", r"config\.json"),
        ("other-shape", r"embed_tokens.weight: expected .*\[131, 128\], found BF16 \[131, 64\]"),
        ("more-layers", "missing"),
    ],
)
def test_load_model_refuses_broken_folders(folder: Path, how: str, reason: str) -> None:
    corrupt(folder, how)
    with pytest.raises(ModelLoadError, match=reason) as error:
        load_model(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing-here", "a/b/c"])
def test_load_model_refuses_missing_folders(path: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_model(path)


def test_load_model_says_that_a_hub_id_is_no_folder_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("halfbyte.models.local_files.snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"nonsense: no such folder; on the hub: .*no network"):
        load_model("nonsense")


def test_load_model_refuses_a_file(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file"):
        load_model(folder / "config.json")


def test_load_model_refuses_other_architectures(tmp_path: Path) -> None:
    config = StableLmConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    StableLmForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'stablelm' is not supported"):
        load_model(tmp_path)


def test_engine_attention_without_a_batch_says_what_to_do() -> None:
    register()
    model: Any = make_model("llama")
    model.set_attn_implementation(ENGINE)
    with pytest.raises(RuntimeError, match=r"make a halfbyte\.Cache"):
        model(input_ids=token_ids(1, 4))


def declare(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def add_tensors(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for layer in range(4):
        for side in ("k", "v"):
            weights[name.format(layer=layer, side=side)] = torch.tensor(0.02)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "suffix", ["weight_scale", "weight_scale_2", "input_scale", "weight_packed"]
)
def test_load_model_refuses_quantized_weights_that_nobody_reads(folder: Path, suffix: str) -> None:
    add_tensors(folder, "model.layers.{layer}.self_attn.{side}_proj." + suffix)
    declare(folder, quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    with pytest.raises(ModelLoadError, match=rf"found quantized weights \(tensor .*{suffix}\)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantization_config", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            },
            "fp8_e4m3",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16},
            },
            "nvfp4",
        ),
    ],
    ids=["modelopt", "compressed-tensors-fp8", "compressed-tensors-nvfp4"],
)
def test_load_model_where_only_the_cache_is_quantized(
    folder: Path, quantization_config: dict, expected: str
) -> None:
    add_tensors(folder, "model.layers.{layer}.self_attn.{side}_scale")
    declare(folder, quantization_config=quantization_config)
    llm = LLM(load_model(folder), kv_cache_dtype="auto")
    assert llm.pool.layout(0).k_dtype == expected
    assert llm.kv_scales is not None
    assert llm.kv_scales.source == f"checkpoint (for {expected})"


def test_load_model_reads_hf_quant_config(folder: Path) -> None:
    add_tensors(folder, "model.layers.{layer}.self_attn.{side}_proj.{side}_scale")
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    llm = LLM(load_model(folder), kv_cache_dtype="auto")
    assert llm.pool.layout(0).k_dtype == "nvfp4"
    assert llm.kv_scales is not None
    assert llm.kv_scales.k_amax[0] == pytest.approx(0.02 * 2688, rel=1e-6)


def test_load_model_by_hub_id_finds_the_scales(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "halfbyte.models.local_files.snapshot_download", lambda *_, **__: str(folder)
    )
    add_tensors(folder, "model.layers.{layer}.self_attn.{side}_scale")
    model = load_model("someone/model")
    assert LLM(model, kv_cache_dtype="fp8").kv_scales.source == "checkpoint (for fp8_e4m3)"  # type: ignore[union-attr]


def test_load_model_names_wrong_shapes(folder: Path) -> None:
    declare(folder, head_dim=16)
    with pytest.raises(ModelLoadError, match=r"_proj.weight: expected .* \[.*\], found BF16 \["):
        load_model(folder)


def test_load_model_refuses_rope_that_depends_on_the_batch(folder: Path) -> None:
    declare(
        folder,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    with pytest.raises(UnsupportedModelError, match="rope type dynamic is not supported"):
        load_model(folder)


@pytest.mark.parametrize(
    ("architecture", "option", "value", "message"),
    [
        ("gemma3_text", "use_bidirectional_attention", True, "use_bidirectional_attention = True"),
        ("llama", "is_causal", False, "is_causal = False is not supported"),
        ("llama", "attention_chunk_size", 64, "attention_chunk_size = 64"),
        ("qwen3", "layer_types", ["chunked_attention"] * 4, "layer_types: chunked_attention not"),
    ],
)
def test_options_that_change_the_mask_are_refused(
    tmp_path: Path, architecture: str, option: str, value: object, message: str
) -> None:
    """They would silently run as causal attention."""
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), option: value}))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path)
    setattr(model.config, option, value)
    with pytest.raises(UnsupportedModelError, match=message):
        Cache(model, "bfloat16")


def test_load_model_refuses_unknown_dtypes(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of auto, float32"):
        load_model(folder, dtype="int8")


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_load_tokenizer_of_a_folder_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_hub: bool
) -> None:
    loaded = load_tokenizer(bundled_model_path())
    loaded.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(local_files, "snapshot_download", lambda *_, **__: tmp_path / "tokenizer")
    again = load_tokenizer("somebody/tokenizer" if is_on_hub else tmp_path / "tokenizer")
    assert again("import os").input_ids == loaded("import os").input_ids


def test_load_tokenizer_refuses_a_folder_without_one(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        load_tokenizer(folder)
