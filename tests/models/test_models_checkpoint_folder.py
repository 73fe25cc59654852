"""A checkpoint is read once, compared with its files, streamed, and stays with its model."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import halfbyte
from checkpoints.folders import load_model, make_folder
from halfbyte.assets import bundled_model_path
from halfbyte.checkpoints import DIALECTS, CheckpointError
from halfbyte.models import ModelLoadError, UnsupportedModelError, find_kv_scales, load_tokenizer
from halfbyte.models.choose_kv_scales import find_draft_kv_scales
from halfbyte.models.kv_calibration import calibrate
from halfbyte.models.layerwise import calibrate_checkpoint
from models.zoo import ARCHITECTURES, make_model, token_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_names(folder: Path, rename: Any) -> None:
    file = folder / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def add_scales(folder: Path, layers: range, scale: float = 0.05) -> None:
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class TestStreaming:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_is_what_transformers_loads(self, tmp_path: Path, architecture: str) -> None:
        dtype = torch.float32 if architecture == "llama" else torch.bfloat16
        make_model(architecture, dtype).save_pretrained(tmp_path, max_shard_size="100KB")
        model = load_model(tmp_path)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert model.dtype == expected.dtype == dtype
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        found, wanted = model.state_dict(), expected.state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
        ids = token_ids(1, 9)
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, expected(ids).logits)

    def test_shards_pass_one_by_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        assert not any(p.is_meta for p in load_model(tmp_path).parameters())

    def test_names_of_a_model_without_a_head(self, tmp_path: Path) -> None:
        model = make_model("llama", tie_word_embeddings=True)
        model.save_pretrained(tmp_path)
        change_names(tmp_path, lambda name: name.removeprefix("model."))
        found = load_model(tmp_path).state_dict()
        assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())


class TestSizes:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("num_hidden_layers", 10**9, "num_hidden_layers: expected 1 .. 10000, found 10000"),
            ("num_hidden_layers", 9999, r"layers\.4: expected 9999 layers"),
            ("num_hidden_layers", "4", "num_hidden_layers: expected 1 .. 10000, found '4'"),
            ("num_hidden_layers", True, "num_hidden_layers: expected 1 .. 10000, found True"),
            ("vocab_size", 10**7, r"embed_tokens.weight: expected .*10000000, 64.*\[131, 64\]"),
            ("vocab_size", 0, "vocab_size: expected 1 .. "),
            ("hidden_size", 2**30, r"embed_tokens.weight: expected .*\[131, 1073741824\]"),
            ("intermediate_size", 2**30, r"gate_proj.weight: expected .*\[1073741824, (64|32)\]"),
            ("head_dim", 2**30, r"q_proj.weight: expected .*\[4294967296, (64|32)\]"),
            ("num_attention_heads", 2**30, "not a multiple of the number of attention heads"),
            ("max_position_embeddings", 2**40, "max_position_embeddings: expected 1 .. "),
        ],
    )
    def test_that_the_files_contradict(
        self, tmp_path: Path, field: str, value: object, message: str
    ) -> None:
        folder = make_folder(tmp_path, "llama")
        edit(folder.plain, **{field: value})
        folder.config(**{field: value})
        for path in (folder.plain, folder.quantized):
            start = time.monotonic()
            with pytest.raises(ModelLoadError, match=message) as error:
                load_model(path)
            assert time.monotonic() - start < 5
            assert "\n" not in str(error.value)

    def test_of_experts(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path, "qwen3_moe")
        edit(folder.plain, num_local_experts=10**7)
        folder.config(num_local_experts=10**7)
        for path in (folder.plain, folder.quantized):
            with pytest.raises(ModelLoadError, match=r"experts: expected 10000000, .*found 4 in"):
                load_model(path)

    def test_where_transformers_reads_the_weights(self, folder: Path) -> None:
        edit(folder, quantization_config={"quant_method": "fp8"}, intermediate_size=2**30)
        with pytest.raises(ModelLoadError, match=r"expected a model that the files can hold \(\d+"):
            load_model(folder)


class TestOneLine:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"eos_token_id": [[1]]}, "eos_token_id: expected a token id"),
            ({"bos_token_id": {"id": 1}}, "bos_token_id: expected a token id"),
            ({"hidden_act": "frob"}, "cannot build a model from it: unknown name 'frob'"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps"),
            ({"dtype": {"value": "float32"}}, "dtype: expected one of float32, bfloat16, float16"),
            ({"dtype": "float64"}, "dtype: expected one of float32, bfloat16, float16"),
            ({"dtype": "int8"}, "dtype: expected one of float32, bfloat16, float16"),
            ({"quantization_config": {"quant_method": ["modelopt"]}}, "quant_method: expected a n"),
        ],
    )
    def test_of_config_json(self, folder: Path, fields: dict[str, Any], message: str) -> None:
        edit(folder, **fields)
        with pytest.raises(ModelLoadError, match=message) as error:
            load_model(folder)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("rope_type", ["frob", ["linear"], 3])
    def test_of_rope_types(self, folder: Path, rope_type: object) -> None:
        edit(folder, rope_parameters={"rope_type": rope_type, "rope_theta": 1e4})
        with pytest.raises(UnsupportedModelError, match=r"rope type .* is not supported; supp"):
            load_model(folder)

    @pytest.mark.parametrize(
        "content", ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "", "\x00", '"text"', "1e9"]
    )
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_of_json(self, folder: Path, name: str, content: str) -> None:
        (folder / name).write_text(content)
        with pytest.raises(
            ModelLoadError, match=rf"{name}: expected a JSON object, found"
        ) as error:
            load_model(folder)
        assert "\n" not in str(error.value)

    def test_of_a_pipe(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            load_model(folder)

    @pytest.mark.parametrize(
        "shard",
        ["x" * 5000 + ".safetensors", "../x.safetensors", "\ud800.safetensors", 3, None, ["a"]],
    )
    def test_of_shard_names(self, folder: Path, shard: object) -> None:
        (folder / "model.safetensors").unlink()
        weight_map = {"model.norm.weight": shard}
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelLoadError, match="names of safetensors files") as error:
            load_model(folder)
        assert len(str(error.value)) < 700

    @pytest.mark.parametrize("path", ["x" * 5000, "/" + "x" * 5000, "a/" + "b" * 300])
    def test_of_paths(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ModelLoadError) as error:
            load_model(Path(path))
        assert str(error.value).startswith(path[:200])
        assert len(str(error.value)) < 700

    def test_of_an_empty_index(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        with pytest.raises(ModelLoadError, match="'weight_map', found an empty one"):
            load_model(folder)

    def test_long_values_are_cut(self, folder: Path) -> None:
        edit(folder, model_type="q" * 100_000)
        with pytest.raises(UnsupportedModelError) as error:
            load_model(folder)
        assert len(str(error.value)) < 700
        error_ = CheckpointError("a\n" + "b" * 5000 + "\x1b[31m\u2028")
        assert str(error_).isprintable()
        assert len(str(error_)) < 700


class TestTokenizers:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Path:
        shutil.copytree(bundled_model_path(), tmp_path / "model")
        return tmp_path / "model"

    @pytest.mark.parametrize(
        "change",
        [
            {"model": {"continuing_subword_prefix": "##"}},
            {"model": {"continuing_subword_prefix": "#" * 5000}},
            {"padding": {"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_id": 0}},
            {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}},
            {"model": {"type": "WordPiece", "unk_token": "[X]", "vocab": {"a": 0}}},
        ],
        ids=["panics", "panics-too", "aborts", "panics-at-encoding", "cannot-encode"],
    )
    def test_that_cannot_be_used(self, tokenizer: Path, change: dict[str, Any]) -> None:
        """Some tokenizer files abort the process: they are tried in a child process."""
        file = tokenizer / "tokenizer.json"
        fields = json.loads(file.read_text())
        padding = {"pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}
        for key, value in change.items():
            whole = fields[key] if key == "model" else padding if key == "padding" else {}
            fields[key] = {**whole, **value}
        file.write_text(json.dumps(fields))
        with pytest.raises(ModelLoadError, match=r"tokenizer.json: unusable tokenizer") as error:
            load_tokenizer(tokenizer)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "takes more than 2 s"),
            ("{{ 'a' * 10**10 }}", "MemoryError"),
        ],
        ids=["endless", "huge"],
    )
    @pytest.mark.parametrize("in_config", [True, False])
    def test_templates_that_never_end(
        self,
        tokenizer: Path,
        template: str,
        reason: str,
        in_config: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("halfbyte.models.tokenizer._SECONDS", 2)
        if in_config:
            file = tokenizer / "tokenizer_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        else:
            (tokenizer / "chat_template.jinja").write_text(template)
        name = "tokenizer_config.json" if in_config else "chat_template.jinja"
        message = rf"{name}: unusable chat template: .*{reason}$"
        with pytest.raises(ModelLoadError, match=message):
            load_tokenizer(tokenizer)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('no') }}",
            "{% generation %}{{ messages[0].content }}{% endgeneration %}",
            "{% broken",
            "{{ messages[5].content }}",
            [{"name": "default", "template": "{{ messages[0].role }}"}],
        ],
        ids=["refuses", "marks", "broken", "needs-more", "named"],
    )
    def test_templates_that_refuse_a_message(self, tokenizer: Path, template: Any) -> None:
        file = tokenizer / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        assert load_tokenizer(tokenizer)("a").input_ids

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model_max_length", {"a": 1}),
            ("model_max_length", "9"),
            ("eos_token", 3),
            ("added_tokens_decoder", {"x": 1}),
            ("extra_special_tokens", 3),
        ],
    )
    def test_settings_of_another_kind(self, tokenizer: Path, field: str, value: object) -> None:
        file = tokenizer / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
        with pytest.raises(ModelLoadError) as error:
            load_tokenizer(tokenizer)
        assert "\n" not in str(error.value)
        assert str(tokenizer) in str(error.value)

    def test_that_has_more_tokens_than_the_model(self, tokenizer: Path) -> None:
        file = tokenizer / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({**fields, "bos_token": "<a token of its own>"}))
        (tokenizer / "kv_scales.json").unlink()
        message = r"the tokenizer has a token 4096, the model a vocabulary of 4096"
        with pytest.raises(ValueError, match=message):
            calibrate_checkpoint(tokenizer, device="cpu", max_tokens=64)
        with pytest.raises(ValueError, match=message):
            halfbyte.Cache(load_model(tokenizer), "nvfp4")

    def test_a_panic_is_an_error_like_others(self, tokenizer: Path) -> None:
        """Tokenizers without a `tokenizer.json` are built in this process."""
        (tokenizer / "tokenizer.json").unlink()
        (tokenizer / "vocab.json").write_text('{"a": 0}')
        (tokenizer / "merges.txt").write_text("zz yy\n")
        with pytest.raises(ModelLoadError):
            load_tokenizer(tokenizer)


class TestScales:
    def test_stay_with_the_model(self, folder: Path) -> None:
        add_scales(folder, range(4))
        model = load_model(folder)
        shutil.rmtree(folder)
        scales = halfbyte.Cache(model, "fp8").kv_scales
        assert scales is not None
        assert scales.source == "checkpoint (for fp8_e4m3)"
        assert scales.k_amax == pytest.approx((0.05 * 448,) * 4)

    def test_of_the_layers_that_need_them(self, tmp_path: Path) -> None:
        make_model("gpt_oss", torch.bfloat16).save_pretrained(tmp_path)
        add_scales(tmp_path, range(1, 4, 2))
        model = load_model(tmp_path)
        kinds = model.config.layer_types
        assert [kinds[i] for i in (1, 3)] == ["full_attention"] * 2
        formats = {"full_attention": "fp8", "sliding_attention": "bfloat16"}
        cache = halfbyte.Cache(model, formats)
        assert cache.kv_scales is not None
        assert cache.kv_scales.amax_of_layer(3) == pytest.approx((0.05 * 448,) * 2)
        with pytest.raises(ValueError, match=r"checkpoint .*: layer 0 has none"):
            halfbyte.Cache(model, "fp8")
        with pytest.raises(ValueError, match="layer 0 has none"):
            cache.kv_scales.save(tmp_path)

    def test_of_layers_in_different_formats(self, folder: Path) -> None:
        """A scale is for the format of its own layer."""
        add_scales(folder, range(3))
        names = ("FP8", "NVFP4", "FP8_K_NVFP4_V")
        layers = {f"model.layers.{i}.self_attn": {"quant_algo": x} for i, x in enumerate(names)}
        declared = {
            "quant_method": "modelopt",
            "kv_cache_quant_algo": "MIXED_PRECISION",
            "kv_cache_quantized_layers": layers,
        }
        edit(folder, quantization_config=declared)
        model = load_model(folder)
        cache = halfbyte.Cache(model, "auto", kv_recipe="plain")
        layouts = [cache.pool.layout(i) for i in range(4)]
        assert [(x.k_dtype.value, x.v_dtype.value) for x in layouts] == [
            ("fp8_e4m3", "fp8_e4m3"),
            ("nvfp4", "nvfp4"),
            ("fp8_e4m3", "nvfp4"),
            ("float32", "float32"),
        ]
        assert cache.kv_scales is not None
        assert cache.kv_scales.k_amax[:3] == pytest.approx((0.05 * 448, 0.05 * 2688, 0.05 * 448))
        assert cache.kv_scales.v_amax[:3] == pytest.approx((0.05 * 448, 0.05 * 2688, 0.05 * 2688))

    def test_of_more_layers_than_the_model_has(self, folder: Path) -> None:
        add_scales(folder, range(5))
        with pytest.raises(ValueError, match="5 layers, the model has 4"):
            find_kv_scales(folder, json.loads((folder / "config.json").read_text()))

    @pytest.mark.parametrize("is_declared", [False, True])
    @pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
    def test_of_a_draft_in_the_layers_after_the_model_s(
        self, folder: Path, field: str, is_declared: bool
    ) -> None:
        tensors = load_file(folder / "model.safetensors")
        layer = {name: x for name, x in tensors.items() if ".layers.3." in name}
        draft = {name.replace(".3.", ".4."): x + 1 for name, x in layer.items()}
        save_file({**tensors, **draft}, folder / "model.safetensors", {"format": "pt"})
        add_scales(folder, range(4))
        add_scales(folder, range(4, 5), 0.5)
        edit(folder, **{field: 1})
        if is_declared:
            layers = {f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(5)}
            declared = {"quant_method": "modelopt", "kv_cache_quantized_layers": layers}
            edit(folder, quantization_config=declared)
        for load in (load_model, AutoModelForCausalLM.from_pretrained):
            cache = halfbyte.Cache(load(folder), "auto" if is_declared else "fp8")
            assert cache.kv_scales is not None
            assert cache.pool.layout(3).k_dtype == "fp8_e4m3"
            assert cache.kv_scales.k_amax == pytest.approx((0.05 * 448,) * 4)
        config = json.loads((folder / "config.json").read_text())
        scales = find_draft_kv_scales(folder, config)
        assert scales is not None
        assert scales.k_amax == pytest.approx((0.5 * 448,))
        add_scales(folder, range(5, 6))
        with pytest.raises(ValueError, match="6 layers, the model has 4 and its draft 1"):
            find_kv_scales(folder, config)

    def test_of_a_draft_alone(self, folder: Path) -> None:
        add_scales(folder, range(4, 5))
        edit(folder, num_nextn_predict_layers=1)
        config = json.loads((folder / "config.json").read_text())
        assert find_kv_scales(folder, config) is None
        add_scales(folder, range(4))
        assert find_draft_kv_scales(folder, {**config, "num_nextn_predict_layers": 2}) is not None

    def test_a_layer_measured_as_zero_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model("llama")
        with torch.no_grad():
            model.model.layers[2].self_attn.v_proj.weight.zero_()
        scales = calibrate(model, token_ids(1, 32), "test")
        assert scales.v_amax[2] == sorted(scales.v_amax[:2] + scales.v_amax[3:])[1]
        assert "V is all zero in layer 2; scaled by the other layers' median" in caplog.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_relative_path_is_not_lost(
    tmp_path: Path, dialect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "q", "llama", dialect)
    folder.change(
        lambda tensors: tensors.update(
            {
                f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.05)
                for i in range(4)
                for x in "kv"
            }
        )
    )
    monkeypatch.chdir(tmp_path / "q")
    model = load_model(Path("quantized"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    scales = halfbyte.Cache(model, "fp8").kv_scales
    assert scales is not None
    assert scales.k_amax == pytest.approx((0.05 * 448,) * 4)
