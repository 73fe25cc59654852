import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints.folders import (
    KV_SCALE,
    QUANTIZED,
    Folder,
    load_model,
    make_folder,
    make_mixed_folder,
)
from halfbyte import LLM, Cache, SamplingParams
from halfbyte.checkpoints import CheckpointError, Dialect
from halfbyte.dispatch import NoImplementationError
from halfbyte.linear import NvFp4Linear
from halfbyte.numerics import nvfp4
from models.zoo import ARCHITECTURES, token_ids


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(token_ids(2, 19)).logits


def layers(model: Any) -> dict[str, NvFp4Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, NvFp4Linear)}


def assert_same_logits(model: Any, folder: Folder) -> None:
    """Logits equal those with dequantized weights, up to the order of float32 sums."""
    expected = logits(load_model(folder.plain))
    assert float((logits(model) - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_architectures_load(tmp_path: Path, architecture: str, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, architecture, dialect, shards=3)
    model = load_model(folder.quantized)
    assert not model.training
    plain = load_model(folder.plain).named_modules()  # where experts are no nn.Linear
    linear = {name for name, module in plain if isinstance(module, nn.Linear)}
    assert set(layers(model)) == {name for name in linear if QUANTIZED.search(f"{name}.weight")}
    assert len(linear) >= 16
    assert all(layer.kernel is not None for layer in layers(model).values())
    assert_same_logits(model, folder)


def test_names_without_the_model_s_prefix(tmp_path: Path, dialect: Dialect) -> None:
    """As files of a model without a head have them."""
    folder = make_folder(tmp_path, "llama", dialect)
    expected = logits(load_model(folder.quantized))
    file = folder.quantized / "model.safetensors"
    tensors = {name.removeprefix("model."): x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(load_model(folder.quantized)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_the_checkpoints_or_the_requested_one(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_folder(tmp_path, dtype=dtype)
    model = load_model(folder.quantized)
    assert model.dtype == model.config.dtype == dtype
    assert {layer.dtype for layer in layers(model).values()} == {dtype}
    assert bool(logits(model).isfinite().all())
    config = json.loads((folder.quantized / "config.json").read_text())
    (folder.quantized / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if "dtype" not in k})
    )
    assert load_model(folder.quantized).dtype == dtype  # as the embeddings are
    model = load_model(folder.quantized, dtype="float32")
    assert {p.dtype for p in model.parameters()} >= {torch.float32, torch.uint8}
    assert dtype not in {p.dtype for p in model.parameters()}


def test_biases_are_loaded(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen2", dialect)
    for file in (folder.plain, folder.quantized):
        tensors = load_file(file / "model.safetensors")
        biases = {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
        assert len(biases) == 12
        generator = torch.Generator().manual_seed(3)
        for name in sorted(biases):
            tensors[name] = torch.randn(biases[name].shape, generator=generator)
        save_file(tensors, file / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(folder.quantized), folder)


def test_layers_that_are_ignored_stay(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, dialect=dialect, is_quantized=lambda name: ".mlp." in name)
    pattern = "*self_attn*" if dialect == "modelopt" else "re:.*self_attn.*"
    folder.declare(ignore=["lm_head", pattern])
    model = load_model(folder.quantized)
    assert {name.split(".")[-1] for name in layers(model)} == {"gate_proj", "up_proj", "down_proj"}
    assert_same_logits(model, folder)


def test_layers_that_are_declared_but_plain_stay(
    tmp_path: Path, dialect: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path, dialect=dialect, is_quantized=lambda name: ".mlp." in name)
    with caplog.at_level(logging.INFO, "halfbyte"):
        assert_same_logits(load_model(folder.quantized), folder)
    assert "16 layers are declared quantized but stored unquantized" in caplog.text


@pytest.mark.parametrize("is_tied", [True, False])
def test_quantized_output_embeddings(tmp_path: Path, dialect: Dialect, is_tied: bool) -> None:
    folder = make_folder(
        tmp_path,
        dialect=dialect,
        is_quantized=lambda name: bool(QUANTIZED.search(name)) or name == "lm_head.weight",
    )
    # A head of its own is used whatever the config says of embeddings that are tied.
    folder.declare(ignore=[])
    folder.config(tie_word_embeddings=is_tied)
    model = load_model(folder.quantized)
    assert "lm_head" in layers(model)
    assert_same_logits(model, folder)


def test_tied_embeddings(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, dialect=dialect, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder.quantized / "model.safetensors")
    folder.declare(ignore=[])
    model = load_model(folder.quantized)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_logits(model, folder)


@pytest.mark.parametrize("per_row", [True, False])
def test_mixed_precision(tmp_path: Path, dialect: Dialect, per_row: bool) -> None:
    folder = make_mixed_folder(tmp_path, dialect, per_row=per_row)
    model = load_model(folder.quantized)
    assert len(layers(model)) == 12
    assert_same_logits(model, folder)


def test_fp8_scales_that_cannot_be(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_mixed_folder(tmp_path, dialect)
    name = "model.layers.1.self_attn.o_proj.weight_scale"
    folder.change(lambda tensors: tensors[name].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=rf"{name}: expected finite numbers above 0"):
        load_model(folder.quantized)


class TestActivations:
    def test_w4a4_runs_as_w4a16_without_native_fp4(
        self, tmp_path: Path, dialect: Dialect, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = make_folder(tmp_path, dialect=dialect, scheme="nvfp4")
        model = load_model(folder.quantized)
        assert not any(layer.quantize_activations for layer in layers(model).values())
        assert "28 of 28 W4A4 layers run as W4A16" in caplog.text
        assert_same_logits(model, folder)

    def test_w4a4_is_emulated_when_asked_for(
        self, tmp_path: Path, dialect: Dialect, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = make_folder(tmp_path, dialect=dialect, scheme="nvfp4")
        model = load_model(folder.quantized, quantize_activations=True)
        assert "run as W4A16" not in caplog.text
        layer = model.model.layers[1].mlp.up_proj
        scale = torch.tensor(0.003) if dialect == "modelopt" else 1 / torch.tensor(300.0)
        x = torch.randn(5, 64)
        values = nvfp4.dequantize(*nvfp4.quantize(x, scale), scale)
        weight = load_model(folder.plain).model.layers[1].mlp.up_proj.weight
        torch.testing.assert_close(layer(x), values @ weight.T, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("has_scales", [False, True])
    def test_groups_that_leave_activations_alone(
        self, tmp_path: Path, has_scales: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """ModelOpt's algorithm has the same name; existing activation scales take precedence."""
        folder = make_folder(tmp_path, scheme="nvfp4")
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
        folder.declare(config_groups={"group_0": group})

        def remove_scales(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if name.endswith("input_scale")]:
                del tensors[name]

        if not has_scales:
            folder.change(remove_scales)
        assert_same_logits(load_model(folder.quantized), folder)
        assert ("W4A4" in caplog.text) == has_scales
        assert "calibration" not in caplog.text

    def test_none_to_quantize(self, tmp_path: Path, dialect: Dialect) -> None:
        folder = make_folder(tmp_path, dialect=dialect)
        with pytest.raises(ValueError, match=r"quantize_activations: .*no activation scales"):
            load_model(folder.quantized, quantize_activations=True)


def test_linear_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)

    def names(**options: Any) -> set[str]:
        model = load_model(folder.quantized, **options)
        return {layer.kernel.name for layer in layers(model).values() if layer.kernel}

    assert names(linear_backend="reference") == {"reference"}
    monkeypatch.setenv("HALFBYTE_NVFP4_GEMM_BACKEND", "reference")
    assert names() == {"reference"}
    with pytest.raises(NoImplementationError, match=r"'cutlass' cannot be used here: .*usable: "):
        names(linear_backend="cutlass")
    with pytest.raises(NoImplementationError, match="unknown 'nonsense'; expected one of"):
        names(linear_backend="nonsense")


def test_options_for_nvfp4_layers_need_some(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(ValueError, match=r"linear_backend: got 'cpu', but .* no NVFP4 layers"):
        load_model(folder.plain, linear_backend="cpu")
    with pytest.raises(ValueError, match="quantize_activations: got False"):
        load_model(folder.plain, quantize_activations=False)
    with pytest.raises(ValueError, match="pass them to load_model"):
        LLM(load_model(folder.quantized), linear_backend="cpu")


def test_batch_invariant_layers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = load_model(folder.quantized, batch_invariant=True)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.batch_invariant
    x = torch.randn(37, 96)
    assert torch.equal(layer(x)[5:6], layer(x[5:6]))


def add_kv_scales(tensors: dict[str, torch.Tensor], dialect: Dialect) -> None:
    for layer in range(4):
        for side in "kv":
            where = f"{side}_proj." if dialect == "modelopt" else ""
            name = f"model.layers.{layer}.self_attn.{where}{side}_scale"
            tensors[name] = torch.tensor(KV_SCALE)


def test_llm_and_cache_agree(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    folder.change(lambda tensors: add_kv_scales(tensors, dialect))
    fp4 = {"type": "float", "num_bits": 4, "group_size": 16}
    declared = {"kv_cache_scheme": "NVFP4" if dialect == "modelopt" else fp4}
    folder.declare(**declared)
    prompt = token_ids(1, 21)
    llm = LLM(load_model(folder.quantized), kv_cache_dtype="auto")
    assert llm.pool.layout(0).k_dtype == "nvfp4"
    assert llm.kv_scales is not None
    assert llm.kv_scales.source == "checkpoint (for nvfp4)"
    output = llm.generate([prompt[0].tolist()], SamplingParams(max_tokens=9, temperature=0))[0]
    model: Any = load_model(folder.quantized)
    ids = model.generate(
        prompt, past_key_values=Cache(model, "nvfp4"), max_new_tokens=9, do_sample=False
    )
    assert output.token_ids == ids[0, 21:].tolist()
    written = json.loads(model.config.to_json_string())["quantization_config"]
    assert written["quant_method"] == dialect


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_mixtures_give_the_tokens_of_dequantized_weights(
    tmp_path: Path, architecture: str, dialect: Dialect
) -> None:
    folder = make_folder(tmp_path, architecture, dialect)
    prompts = [token_ids(1, n, seed=n) for n in (5, 21)]
    plain: Any = load_model(folder.plain)
    expected = [
        plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        for ids in prompts
    ]
    model: Any = load_model(folder.quantized)
    outputs = LLM(model).generate(
        [ids[0].tolist() for ids in prompts], SamplingParams(max_tokens=12, temperature=0)
    )
    assert [output.token_ids for output in outputs] == expected
    for ids, tokens in zip(prompts, expected, strict=True):
        cache = Cache(model, "float32")
        found = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
        assert found[0, ids.shape[1] :].tolist() == tokens


def test_generation_config_is_loaded(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder.quantized / "generation_config.json").write_text('{"top_k": 7, "do_sample": true}')
    assert load_model(folder.quantized).generation_config.top_k == 7


def test_saving_says_what_to_do_instead(tmp_path: Path) -> None:
    model = load_model(make_folder(tmp_path).quantized)
    with pytest.raises(ValueError, match="is not serializable"):
        model.save_pretrained(tmp_path / "copy")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_on_a_gpu(tmp_path: Path, architecture: str, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, architecture, dialect, shards=2, dtype=torch.bfloat16)
    model = load_model(folder.quantized, device="cuda")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cuda"}
    ids = token_ids(2, 19)
    with torch.no_grad():
        found = model(ids.cuda()).logits.float().cpu()
        expected = load_model(folder.quantized, dtype="float32")(ids).logits
    similarity = nn.functional.cosine_similarity(found, expected, dim=-1)
    assert float(similarity.min()) > 0.99
    output = LLM(model).generate([ids[0].tolist()], SamplingParams(max_tokens=4))[0]
    assert len(output.token_ids) == 4
