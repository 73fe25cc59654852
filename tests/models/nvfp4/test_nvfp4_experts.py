"""MoE models with quantized experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints.folders import Folder, load_model, make_folder, quantize_folder
from halfbyte import LLM, SamplingParams
from halfbyte.checkpoints import TENSOR_NAMES, CheckpointError, Dialect
from halfbyte.dispatch import NoImplementationError
from halfbyte.models.nvfp4.experts import ExpertList
from halfbyte.moe import GatedActivation, NvFp4Experts
from models.nvfp4.test_nvfp4_load_model import assert_same_logits, layers
from models.zoo import make_model, token_ids


def test_quantized_experts_are_one_module(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(
        tmp_path, "qwen3_moe", dialect, is_quantized=lambda name: ".experts." in name
    )
    model = load_model(folder.quantized)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, NvFp4Experts)
    assert experts.kernel is not None
    assert_same_logits(model, folder)


def test_experts_of_a_named_backend(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3_moe")
    model = load_model(folder.quantized, moe_backend="reference")
    assert model.model.layers[0].mlp.experts.kernel.name == "reference"
    assert_same_logits(model, folder)
    with pytest.raises(NoImplementationError, match="MoE backend: unknown 'nonsense'"):
        load_model(folder.quantized, moe_backend="nonsense")
    dense = make_folder(tmp_path / "dense", "qwen3")
    with pytest.raises(ValueError, match="moe_backend: got 'cpu', but no layer has NVFP4 experts"):
        load_model(dense.quantized, moe_backend="cpu")
    with pytest.raises(ValueError, match=r"moe_backend: got 'cpu', but .* has no NVFP4"):
        load_model(dense.plain, moe_backend="cpu")


def test_experts_with_quantized_activations_run_one_by_one(
    tmp_path: Path, dialect: Dialect
) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, "nvfp4")
    model = load_model(folder.quantized, quantize_activations=True)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, ExpertList)
    assert layers(experts)["2.up_proj"].quantize_activations
    assert isinstance(load_model(folder.quantized).model.layers[0].mlp.experts, NvFp4Experts)


def test_batch_invariance_holds_for_experts_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", is_quantized=lambda name: ".experts." in name)
    with pytest.raises(ValueError, match=r"batch_invariant: model\.layers\.0\.mlp\.experts was"):
        LLM(load_model(folder.quantized), batch_invariant=True)
    model = load_model(folder.quantized, batch_invariant=True)
    assert model.model.layers[0].mlp.experts.kernel.config.batch_invariant
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in (3, 18, 7)]
    greedy = SamplingParams(max_tokens=6, temperature=0)
    together = LLM(model, batch_invariant=True).generate(prompts, greedy)
    alone = LLM(model, batch_invariant=True).generate(prompts[1:2], greedy)
    assert together[1].token_ids == alone[0].token_ids


def test_shards_may_split_experts(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, shards=3)
    assert_same_logits(load_model(folder.quantized), folder)


def test_saved_experts_are_those_of_the_file(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, "nvfp4")
    saved = load_model(folder.quantized).state_dict()
    for name, tensor in load_file(folder.quantized / "model.safetensors").items():
        assert saved[name].dtype == tensor.dtype
        bits = (x.reshape(-1).view(torch.uint8) for x in (saved[name], tensor))
        assert torch.equal(*bits), name


def test_unquantized_experts_stay_fused(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, is_quantized=lambda name: "o_proj" in name)
    model = load_model(folder.quantized)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dim() == 3
    assert_same_logits(model, folder)


def test_unquantized_experts_may_be_fused_in_the_file(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, is_quantized=lambda name: "o_proj" in name)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            block = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}.{i}.{p}_proj.weight") for i in range(4)])
                for p in ("gate", "up", "down")
            )
            tensors[f"{block}.gate_up_proj"] = torch.cat([gate, up], 1)
            tensors[f"{block}.down_proj"] = down

    folder.change(fuse)
    assert_same_logits(load_model(folder.quantized), folder)


@pytest.mark.parametrize("plain", ["0.gate_proj", "2.down_proj"])
def test_experts_of_several_schemes_are_refused(
    tmp_path: Path, dialect: Dialect, plain: str
) -> None:
    layer = f"model.layers.1.mlp.experts.{plain}"
    folder = make_folder(
        tmp_path,
        "qwen3_moe",
        dialect,
        is_quantized=lambda name: name.endswith("_proj.weight") and not name.startswith(layer),
    )
    with pytest.raises(CheckpointError, match=f"{layer}: expected nvfp4 .*found unquantized"):
        load_model(folder.quantized)


@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "weight_global_scale"])
def test_an_absent_tensor_is_named(tmp_path: Path, dialect: Dialect, tensor: str) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    name = f"model.layers.2.mlp.experts.3.up_proj.{getattr(TENSOR_NAMES[dialect], tensor)}"
    folder.change(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name}: expected .*found no such tensor"):
        load_model(folder.quantized)


def test_an_absent_expert_is_named(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    expert = "model.layers.2.mlp.experts.1."

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(expert)]:
            del tensors[name]

    folder.change(forget)
    with pytest.raises(CheckpointError, match=f"{expert}gate_proj.*found no such tensor"):
        load_model(folder.quantized)


def test_a_bad_scale_is_named(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    name = f"model.layers.2.mlp.experts.1.down_proj.{TENSOR_NAMES[dialect].weight_global_scale}"
    folder.change(lambda tensors: tensors[name].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=f"{name}: expected a finite number above 0"):
        load_model(folder.quantized)


def test_each_expert_has_its_own_scales(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    experts = load_model(folder.quantized).model.layers[0].mlp.experts
    scales = experts.packed_experts().gate_up.global_scale
    assert len(set(scales.flatten().tolist())) == 8


def test_a_token_may_go_to_no_expert(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3_moe")
    experts = load_model(folder.quantized).model.layers[0].mlp.experts
    x, weights = torch.randn(3, 64), torch.rand(3, 2)
    out = experts(x, torch.tensor([[0, 3], [4, 4], [1, 4]]), weights)
    assert bool((out[1] == 0).all())
    alone = experts(x[2:], torch.tensor([[1]]), weights[2:, :1])
    torch.testing.assert_close(out[2], alone[0])


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-OSS's tensors as compressed-tensors' tools name them: experts one by one."""
    result = {}
    for name, tensor in tensors.items():
        block, _, own = name.partition(".experts.")
        if not own:
            result[name] = tensor
            continue
        is_bias = own.endswith("_bias")
        for i, matrix in enumerate(tensor if is_bias else tensor.transpose(1, 2)):
            parts = {"down_proj": matrix}
            if own.startswith("gate_up"):
                parts = {"gate_proj": matrix[::2], "up_proj": matrix[1::2]}
            for projection, part in parts.items():
                kind = "bias" if is_bias else "weight"
                result[f"{block}.experts.{i}.{projection}.{kind}"] = part.contiguous()
    return result


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `per_expert`."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack([tensors[f"{block}.experts.{i}.{p}_proj.{kind}"] for i in range(4)])
                for p in ("gate", "up", "down")
            )
            both = torch.stack([gate, up], 2).flatten(1, 2)
            if kind == "weight":
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            result[f"{block}.experts.gate_up_proj{suffix}"] = both.contiguous()
            result[f"{block}.experts.down_proj{suffix}"] = down.contiguous()
    return result


def gpt_oss_folder(tmp_path: Path, dialect: Dialect, scheme: Any = "nvfp4-a16") -> Folder:
    model = make_model("gpt_oss")
    for name, parameter in model.named_parameters():
        if "experts" in name and name.endswith("_bias"):
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    save_file(per_expert(load_file(file)), file, metadata={"format": "pt"})
    folder = quantize_folder(tmp_path, dialect, scheme)
    save_file(fused(load_file(file)), file, metadata={"format": "pt"})
    return folder


def test_gpt_oss_with_experts_one_by_one(tmp_path: Path, dialect: Dialect) -> None:
    folder = gpt_oss_folder(tmp_path, dialect)
    model = load_model(folder.quantized)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, NvFp4Experts)
    assert experts.activation == GatedActivation(1.702, 7.0, 1.0)
    assert experts.has_bias
    assert_same_logits(model, folder)


def test_gpt_oss_by_from_pretrained(tmp_path: Path, dialect: Dialect) -> None:
    folder = gpt_oss_folder(tmp_path, dialect)
    folder.declare(provider="halfbyte")
    found: Any = AutoModelForCausalLM.from_pretrained(folder.quantized, output_loading_info=True)
    model, info = found
    assert not any(info.values()), info
    assert isinstance(model.model.layers[0].mlp.experts, NvFp4Experts)
    assert_same_logits(model, folder)


def test_biases_of_experts_that_are_not_finite(tmp_path: Path, dialect: Dialect) -> None:
    folder = gpt_oss_folder(tmp_path, dialect)
    name = "model.layers.1.mlp.experts.2.up_proj.bias"
    folder.change(lambda tensors: tensors[name][3:5].fill_(torch.nan))
    message = r"layers\.1\.mlp\.experts\.gate_up_bias: expert 2: expected finite .* found 2 NaN or"
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folder.quantized)
    assert "\n" not in str(error.value)


def test_gpt_oss_runs_as_w4a16_only(tmp_path: Path) -> None:
    folder = gpt_oss_folder(tmp_path, "modelopt", "nvfp4")
    assert_same_logits(load_model(folder.quantized), folder)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts: expected NVFP4 weights"):
        load_model(folder.quantized, quantize_activations=True)


def test_other_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(4, 32, 192, dtype=torch.uint8)

    folder.change(quantize)
    with pytest.raises(CheckpointError, match=rf"{name}: expected BF16/.*found U8 \[4, 32"):
        load_model(folder.quantized)


def test_experts_packed_into_one_tensor_are_refused(tmp_path: Path) -> None:
    """The tensors that ModelOpt 0.47 exports for GPT-OSS."""
    folder = make_folder(
        tmp_path, "gpt_oss", is_quantized=lambda name: name.endswith("_proj.weight")
    )
    block = "model.layers.1.mlp.experts"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name, n, k in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            tensors[f"{block}.{name}"] = torch.zeros(4, n, k // 2, dtype=torch.uint8)
            scales = torch.zeros(4, n, k // 16).to(torch.float8_e4m3fn)
            tensors[f"{block}.{name}_weight_scale"] = scales
            tensors[f"{block}.{name}_weight_scale_2"] = torch.ones(())
            tensors[f"{block}.{name}_input_scale"] = torch.ones(())

    folder.change(pack)
    folder.declare(provider="halfbyte", ignore=["lm_head", "*router*"])
    message = (
        rf"{block}\.gate_up_proj: expected .* packed into one tensor \(as ModelOpt exports GPT"
    )
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=message) as error:
            load(folder.quantized)
        assert "\n" not in str(error.value)


def test_packed_experts_beside_fused_ones_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss", "compressed-tensors")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_packed"
    folder.change(lambda tensors: tensors.update({name: torch.zeros(9, 9, dtype=torch.uint8)}))
    with pytest.raises(CheckpointError, match=rf"{name}: expected no tensor of quantized weights"):
        load_model(folder.quantized)


@pytest.mark.parametrize("lost", [1.0, torch.inf])
@pytest.mark.parametrize("quantize_activations", [None, True])
def test_experts_that_calibration_never_reached(
    tmp_path: Path,
    dialect: Dialect,
    quantize_activations: bool | None,
    lost: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ModelOpt omits their scale; compressed-tensors writes 1, older versions the inverse of 0."""
    folder = make_folder(tmp_path, "qwen3_moe", dialect, "nvfp4")
    expert, scale = "model.layers.1.mlp.experts.2", TENSOR_NAMES[dialect].input_global_scale
    names = [f"{expert}.{name}.{scale}" for name in ("gate_proj", "up_proj", "down_proj")]

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            if dialect == "modelopt":
                del tensors[name]
            else:
                tensors[name] = torch.tensor([lost])

    folder.change(forget)
    model = load_model(folder.quantized, quantize_activations=quantize_activations)
    quantized = {n: layer.quantize_activations for n, layer in layers(model).items()}
    assert len(quantized) == (64 if quantize_activations else 16)
    assert not any(flag for name, flag in quantized.items() if name.startswith(expert))
    assert sum(quantized.values()) == (len(quantized) - 3 if quantize_activations else 0)
    assert f"{expert}." in caplog.text
    assert "it and 2 more layers of experts run as W4A16" in caplog.text
    assert not torch.isnan(model(token_ids(1, 17)).logits).any()
    if not quantize_activations:
        assert_same_logits(model, folder)


def test_other_layers_need_their_activation_scales(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect, "nvfp4")
    names = TENSOR_NAMES[dialect]
    name = f"model.layers.1.self_attn.q_proj.{names.input_global_scale}"
    folder.change(lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name}: expected F32 .*found no such tensor"):
        load_model(folder.quantized)
