"""Plain transformers after `import halfbyte`."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils.quantization_config import CompressedTensorsConfig

from checkpoints.folders import Folder, declaration, load_model, make_folder, make_mixed_folder
from halfbyte import LLM, SamplingParams, transformers_hook
from halfbyte.checkpoints import DIALECTS, CheckpointError, Dialect
from halfbyte.layouts import KVCacheDType
from halfbyte.linear import NvFp4Linear
from halfbyte.models.nvfp4.transformers_quantizer import METHOD, NvFp4Config, NvFp4Quantizer
from models.zoo import token_ids
from slow import one_in


def tagged(folder: Path, architecture: str, dialect: Dialect, **options: Any) -> Folder:
    result = make_folder(folder, architecture, dialect, **options)
    result.declare(provider="halfbyte")
    return result


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(token_ids(2, 17)).logits


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loads_as_load_model_does(
    tmp_path: Path, architecture: str, dialect: Dialect, dtype: torch.dtype
) -> None:
    folder = tagged(tmp_path, architecture, dialect, shards=2, dtype=dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder.quantized, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    assert isinstance(model.hf_quantizer, NvFp4Quantizer)
    assert model.dtype == dtype
    assert any(isinstance(module, NvFp4Linear) for module in model.modules())
    assert torch.equal(logits(model), logits(load_model(folder.quantized)))


def test_dtype_of_the_callers_choice(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3_moe", dialect, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder.quantized, dtype=torch.float32)
    expected = logits(load_model(folder.quantized, dtype="float32"))
    assert torch.equal(logits(model), expected)


def test_mixed_precision(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_mixed_folder(tmp_path, dialect)
    folder.declare(provider="halfbyte")
    model, expected = (
        load(folder.quantized) for load in (AutoModelForCausalLM.from_pretrained, load_model)
    )
    assert torch.equal(logits(model), logits(expected))


def test_device_map(tmp_path: Path, dialect: Dialect) -> None:
    pytest.importorskip("accelerate")
    folder = tagged(tmp_path, "qwen3", dialect)
    expected = logits(load_model(folder.quantized))
    model = AutoModelForCausalLM.from_pretrained(folder.quantized, device_map="cpu")
    assert torch.equal(logits(model), expected)
    two = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="device_map: NVFP4 layers need one device, got"):
        AutoModelForCausalLM.from_pretrained(folder.quantized, device_map=two)


def test_serves_the_engine(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3", dialect)
    prompt = token_ids(1, 9)[0].tolist()
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    theirs, ours = (
        LLM(model).generate([prompt], SamplingParams(temperature=0))[0].token_ids
        for model in (model, load_model(folder.quantized))
    )
    assert theirs == ours


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mixed"])
def test_an_untagged_modelopt_checkpoint_loads_too(tmp_path: Path, method: str) -> None:
    folder = make_folder(tmp_path)
    folder.declare(quant_method=method)
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    assert torch.equal(logits(model), logits(load_model(folder.quantized)))


@pytest.mark.parametrize("quantized_head", [True, False])
def test_tied_embeddings(tmp_path: Path, dialect: Dialect, quantized_head: bool) -> None:
    folder = tagged(
        tmp_path,
        "qwen3",
        dialect,
        is_quantized=lambda name: "_proj" in name or (quantized_head and "lm_head" in name),
        tie_word_embeddings=not quantized_head,
    )
    folder.declare(ignore=[])
    folder.config(tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    assert isinstance(model.lm_head, NvFp4Linear) == quantized_head
    assert torch.equal(logits(model), logits(load_model(folder.quantized)))


def test_only_the_kv_cache_is_quantized(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, is_quantized=lambda name: False)
    folder.config(quantization_config={"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"})
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    assert torch.equal(logits(model), logits(load_model(folder.plain)))
    assert LLM(model, kv_cache_dtype="auto").pool.layout(0).k_dtype.is_nvfp4


def test_a_missing_scale_is_an_error_and_not_random(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3", dialect)
    name = "model.layers.2.mlp.up_proj.weight_scale"
    folder.change(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name}: expected .* found no such tensor"):
        AutoModelForCausalLM.from_pretrained(folder.quantized)


def test_more_experts_per_token_than_there_are(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3_moe", dialect)
    folder.config(num_experts_per_tok=9)
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(
            CheckpointError, match=r"num_experts_per_tok: expected 1 \.\. 4, found 9"
        ):
            load(folder.quantized)


def test_packed_weights_that_nothing_declares_are_an_error(tmp_path: Path) -> None:
    folder = tagged(tmp_path, "qwen3", "compressed-tensors")
    folder.declare(config_groups={})
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(CheckpointError, match=r"no such tensor|found quantized weights"):
            load(folder.quantized)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"]
)
def test_a_missing_plain_weight_is_an_error_and_not_random(
    tmp_path: Path, dialect: Dialect, name: str
) -> None:
    folder = tagged(tmp_path, "qwen3_moe", dialect)
    folder.change(lambda tensors: tensors.pop(name))
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(CheckpointError, match=rf"{name}: expected .* found no such tensor"):
            load(folder.quantized)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_surplus_quantized_tensor_is_an_error(
    tmp_path: Path, dialect: Dialect, architecture: str
) -> None:
    """Of a layer that the model does not have, with a name like those of its layers."""
    folder = tagged(tmp_path, architecture, dialect)
    name = "model.layers.99.self_attn.q_proj.weight_scale"
    folder.change(lambda tensors: tensors.update({name: torch.ones(64, 4)}))
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(CheckpointError, match=rf"{name}: expected no tensor of quantized"):
            load(folder.quantized)


def is_of_attention(name: str) -> bool:
    return "attn" in name and "_proj" in name


def test_unquantized_experts_beside_quantized_attention(tmp_path: Path, dialect: Dialect) -> None:
    folder = tagged(tmp_path, "qwen3_moe", dialect, is_quantized=is_of_attention)
    folder.declare(ignore=["lm_head", "*mlp*" if dialect == "modelopt" else "re:.*mlp.*"])
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    assert torch.equal(logits(model), logits(load_model(folder.quantized)))


@pytest.mark.parametrize("field", ["kv_cache_scheme", "kv_cache_quant_algo"])
@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": None}, "float32"),
        ({}, "nvfp4"),  # the copy's
    ],
    ids=["fp8", "null", "none"],
)
def test_hf_quant_config_says_which_cache(
    tmp_path: Path, field: str, algo: dict[str, object], expected: str
) -> None:
    folder = tagged(tmp_path, "qwen3", "modelopt")
    folder.declare(**{field: "NVFP4"})
    declared = {"quant_algo": "W4A16_NVFP4", "group_size": 16, **algo}
    declared["exclude_modules"] = ["lm_head"]
    (folder.quantized / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        found = KVCacheDType.from_checkpoint(load(folder.quantized).config)
        assert found.value == expected


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("quantized_head", [True, False])
def test_a_base_model_has_the_values_of_the_model_with_a_head(
    tmp_path: Path, architecture: str, dialect: Dialect, quantized_head: bool
) -> None:
    folder = tagged(
        tmp_path,
        architecture,
        dialect,
        is_quantized=lambda name: (
            name.endswith("_proj.weight") or (quantized_head and "lm_head" in name)
        ),
    )
    folder.declare(ignore=[])
    loaded: Any = AutoModel.from_pretrained(folder.quantized, output_loading_info=True)
    model, info = loaded
    head = {name for name in info.pop("unexpected_keys") if not name.startswith("lm_head.")}
    assert not head
    assert not any(info.values()), info
    assert isinstance(model.hf_quantizer, NvFp4Quantizer)
    expected = load_model(folder.quantized).model
    tensors, others = dict(model.state_dict()), expected.state_dict()
    assert list(tensors) == list(others)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    ids = token_ids(2, 17)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, expected(ids).last_hidden_state)


def test_a_base_model_of_which_only_the_kv_cache_is_quantized(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, is_quantized=lambda name: False)
    folder.config(quantization_config={"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"})
    model = AutoModel.from_pretrained(folder.quantized)
    expected = load_model(folder.plain).model.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight_scale"], ids=["plain", "scale"]
)
def test_a_base_model_s_missing_tensor_is_named_as_in_the_files(
    tmp_path: Path, dialect: Dialect, name: str
) -> None:
    folder = tagged(tmp_path, "qwen3", dialect)
    folder.change(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf": {name}: expected .* found no such tensor"):
        AutoModel.from_pretrained(folder.quantized)


def test_an_unknown_scheme_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.declare(quant_algo="INT4_AWQ")
    with pytest.raises(CheckpointError, match=r"quant_algo: expected .* found 'INT4_AWQ'"):
        AutoModelForCausalLM.from_pretrained(folder.quantized)


ORDERS = {
    "halfbyte-first": "import halfbyte; assert 'transformers' not in sys.modules",
    "transformers-first": "import transformers.modeling_utils, halfbyte",
}


@pytest.mark.parametrize(
    "order", one_in(2, (pytest.param(code, id=name) for name, code in ORDERS.items()))
)
def test_any_order_of_imports(tmp_path: Path, order: str) -> None:
    folders = [str(tagged(tmp_path / d, "llama", d).quantized) for d in DIALECTS]
    code = (
        f"import sys; {order}; from transformers import AutoModelForCausalLM as Auto\n"
        f"for folder in {folders}: print(type(Auto.from_pretrained(folder).hf_quantizer).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["NvFp4Quantizer"] * 2


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_experts_that_transformers_would_misread(
    tmp_path: Path, architecture: str, auto: Any
) -> None:
    """Of compressed-tensors files that halfbyte did not write."""
    pytest.importorskip("compressed_tensors")
    folder = make_folder(tmp_path, architecture, "compressed-tensors")
    message = (
        r"experts\.0\.\w+\.weight_global_scale: expected unquantized experts.*load_model reads"
    )
    with pytest.raises(CheckpointError, match=message) as error:
        auto.from_pretrained(folder.quantized)
    assert "\n" not in str(error.value)
    assert torch.isfinite(logits(load_model(folder.quantized))).all()


def test_the_package_keeps_models_without_experts(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = make_folder(tmp_path, "qwen3", "compressed-tensors", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder.quantized)
    assert isinstance(model.hf_quantizer, CompressedTensorsHfQuantizer)
    expected = logits(load_model(folder.quantized))
    assert (logits(model) - expected).abs().max() < 0.05 * expected.abs().max()


class TestRegistration:
    def test_others_checkpoints_go_where_they_went(self) -> None:
        entry = AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
        assert issubclass(entry, CompressedTensorsConfig)
        seen = []

        class Upstream:
            @classmethod
            def from_dict(cls, section: dict[str, Any]) -> str:
                seen.append(section)
                return "theirs"

        dispatching = transformers_hook._dispatching(Upstream)
        theirs = declaration("compressed-tensors")
        assert dispatching.from_dict(theirs) == "theirs"
        ours = {**theirs, "provider": "halfbyte"}
        assert isinstance(dispatching.from_dict(ours), NvFp4Config)
        assert dispatching.from_dict(ours).to_dict() == ours
        assert seen == [theirs]

    def test_happens_once(self) -> None:
        entry = AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
        transformers_hook.install()
        assert AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is entry
        assert METHOD == transformers_hook.METHOD
        assert METHOD in AUTO_QUANTIZER_MAPPING

    def test_a_method_that_transformers_has_by_then_stays_its_own(self) -> None:
        class Theirs(NvFp4Config):
            pass

        registry: Any = ModuleType("registry")
        registry.AUTO_QUANTIZER_MAPPING = {}
        registry.AUTO_QUANTIZATION_CONFIG_MAPPING = dict.fromkeys(DIALECTS, Theirs)
        transformers_hook._register(registry)
        entry = registry.AUTO_QUANTIZATION_CONFIG_MAPPING["modelopt"]
        section = declaration("modelopt")
        assert type(entry.from_dict(section)) is Theirs
        assert type(entry.from_dict({**section, "provider": "halfbyte"})) is NvFp4Config

    def test_a_transformers_without_tables_is_left_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "halfbyte"):
            transformers_hook._register(ModuleType("registry"))
        assert "halfbyte.load_model can" in caplog.text
