"""Mixtures whose experts are quantized."""

from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints.folders import load_model, make_folder
from halfbyte.checkpoints import TENSOR_NAMES, CheckpointError, Dialect
from halfbyte.linear import NvFp4Linear
from halfbyte.models.nvfp4.experts import Experts
from models.nvfp4.test_nvfp4_load_model import assert_same_logits, layers
from models.zoo import token_ids


def test_quantized_experts_run_one_by_one(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(
        tmp_path, "qwen3_moe", dialect, is_quantized=lambda name: ".experts." in name
    )
    model = load_model(folder.quantized)
    assert isinstance(model.model.layers[0].mlp.experts, Experts)
    assert_same_logits(model, folder)


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


def test_experts_of_several_schemes(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(
        tmp_path,
        "qwen3_moe",
        dialect,
        is_quantized=lambda name: ".experts.2." in name or "layers.1.mlp.experts" in name,
    )
    model = load_model(folder.quantized)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts[2].up_proj, NvFp4Linear)
    assert isinstance(experts[1].up_proj, nn.Linear)
    assert_same_logits(model, folder)


def test_each_expert_has_its_own_scales(tmp_path: Path, dialect: Dialect) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dialect)
    experts = load_model(folder.quantized).model.layers[0].mlp.experts
    scales = {float(expert.gate_proj.weight_global_scale) for expert in experts}
    assert len(scales) == 4


def test_a_token_may_go_to_no_expert(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3_moe")
    experts = load_model(folder.quantized).model.layers[0].mlp.experts
    x, weights = torch.randn(3, 64), torch.rand(3, 2)
    index = torch.tensor([[0, 3], [4, 4], [1, 4]])
    out = experts(x, index, weights)
    assert bool((out[1] == 0).all())
    torch.testing.assert_close(out[2], experts[1](x[2:])[0] * weights[2, 0])


def test_other_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(4, 32, 192, dtype=torch.uint8)

    folder.change(quantize)
    with pytest.raises(CheckpointError, match=rf"{name}: expected BF16/.*found U8 \[4, 32"):
        load_model(folder.quantized)


def test_unfused_experts_with_biases_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gpt_oss", "compressed-tensors")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_packed"
    folder.change(lambda tensors: tensors.update({name: torch.zeros(9, 9, dtype=torch.uint8)}))
    expected = rf"{name}: expected BF16/F16/F32, as experts with biases \(GptOssExperts\)"
    with pytest.raises(CheckpointError, match=expected):
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
    """ModelOpt leaves their scale out, compressed-tensors writes 1, or once the inverse of 0."""
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
