"""GPT-OSS's own files: experts in MXFP4."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from checkpoints.folders import Folder, load_model
from checkpoints.mxfp4_folders import SECTION, dequantize, quantize
from halfbyte import LLM, Cache, SamplingParams
from halfbyte.checkpoints import CheckpointError
from halfbyte.models import ModelLoadError
from halfbyte.moe import GatedActivation, MxFp4Experts
from models.nvfp4.test_nvfp4_load_model import assert_same_logits
from models.zoo import make_model, token_ids

BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP_SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    model = make_model("gpt_oss")
    for name, parameter in model.named_parameters():
        if "experts" in name and name.endswith("_bias"):
            parameter.data.normal_()
    result = Folder(tmp_path / "quantized", tmp_path / "plain", "modelopt")
    model.save_pretrained(result.plain)
    shutil.copytree(result.plain, result.quantized)
    result.change(quantize)
    tensors = load_file(result.quantized / "model.safetensors")
    dequantize(tensors)
    save_file(tensors, result.plain / "model.safetensors", metadata={"format": "pt"})
    result.config(quantization_config=SECTION)
    return result


def test_experts_stay_in_four_bits(folder: Folder) -> None:
    model = load_model(folder.quantized)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, MxFp4Experts)
    assert experts.kernel is not None
    assert experts.activation == GatedActivation(1.702, 7.0, 1.0, interleaved=True)
    assert_same_logits(model, folder)
    with pytest.raises(ValueError, match="is not serializable"):
        model.save_pretrained(folder.plain)


def test_state_dict_is_that_of_the_file(folder: Folder) -> None:
    model = load_model(folder.quantized)
    saved = model.state_dict()
    for name, tensor in load_file(folder.quantized / "model.safetensors").items():
        assert torch.equal(saved[name], tensor), name
    experts = model.model.layers[0].mlp.experts
    again = MxFp4Experts(4, 64, 96)
    again.load_state_dict(experts.state_dict())
    ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.3, 0.7]])
    x = torch.randn(1, 64)
    assert torch.equal(again(x, ids, weights), experts(x, ids, weights))
    assert again.bfloat16()(x.bfloat16(), ids, weights).dtype == torch.bfloat16


def test_tokens_are_those_of_dequantized_weights(folder: Folder) -> None:
    prompt = token_ids(1, 21)
    plain: Any = load_model(folder.plain)
    expected = plain.generate(prompt, max_new_tokens=12, do_sample=False)[0, 21:].tolist()
    model: Any = load_model(folder.quantized)
    outputs = LLM(model).generate(
        [prompt[0].tolist()], SamplingParams(max_tokens=12, temperature=0)
    )
    assert outputs[0].token_ids == expected
    cache = Cache(model, "float32")
    found = model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert found[0, 21:].tolist() == expected


def test_backend_of_the_callers_choice(folder: Folder) -> None:
    model = load_model(folder.quantized, moe_backend="reference", batch_invariant=True)
    experts = model.model.layers[0].mlp.experts
    assert experts.kernel.name == "reference"
    assert experts.kernel.config.batch_invariant
    assert_same_logits(model, folder)
    with pytest.raises(ValueError, match=r"linear_backend: got 'cpu', but .* has no NVFP4"):
        load_model(folder.quantized, linear_backend="cpu")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(BLOCKS), f"{BLOCKS}: expected U8 .*found no such tensor"),
        (lambda t: t.pop(SCALES), rf"{SCALES}: expected U8 \[4, 64, 3\], found no such tensor"),
        (
            lambda t: t.update({SCALES: t[SCALES][:, :-1].contiguous()}),
            rf"{SCALES}: expected U8 \[4, 64, 3\], found U8 \[4, 63, 3\]",
        ),
        (
            lambda t: t[SCALES][2, 5].fill_(0xFF),
            r"layers\.1\.mlp\.experts\.down_proj_scales: expert 2: expected finite .*found 3 NaN",
        ),
        (
            lambda t: t[GATE_UP_SCALES][2, 3].copy_(torch.tensor([80, 127])),
            r"layers\.1\.mlp\.experts: gate_up: expert 2, row 3: expected MXFP4 exponents within "
            r"17 of the row's largest, found -47 and 0; the MoE backend 'reference' takes any ",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.randn(4, 64, 192)}),
            rf"{EXPERTS}\.gate_up_proj: expected no such tensor beside experts in MXFP4, found",
        ),
        (
            lambda t: t[f"{EXPERTS}.down_proj_bias"][2, 5:7].fill_(torch.nan),
            rf"{EXPERTS}\.down_proj_bias: expert 2: expected finite biases, found 2 NaN or",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}),
            r"q_proj\.weight_scale: expected no tensor of quantized weights",
        ),
    ],
)
def test_bad_files_are_one_line(
    folder: Folder, edit: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder.change(edit)
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folder.quantized)
    assert "\n" not in str(error.value)


def test_reference_takes_exponents_that_are_far_apart(folder: Folder) -> None:
    folder.change(lambda t: t[GATE_UP_SCALES][2, 3].copy_(torch.tensor([80, 127])))
    with pytest.raises(ModelLoadError, match="'reference' takes any"):
        halfbyte.load_model(folder.quantized, moe_backend="cpu")
    model = load_model(folder.quantized, moe_backend="reference")
    assert model(token_ids(1, 5)).logits.isfinite().all()


def test_sizes_that_blocks_do_not_divide(folder: Folder) -> None:
    config = json.loads((folder.quantized / "config.json").read_text())
    folder.config(intermediate_size=config["intermediate_size"] + 16)
    with pytest.raises(CheckpointError, match=r"experts: intermediate_size: expected a positive"):
        load_model(folder.quantized)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="activation: expected one that is interleaved"):
        MxFp4Experts(4, 64, 32, activation=GatedActivation())
    empty = MxFp4Experts(4, 64, 32)
    with pytest.raises(CheckpointError, match="gate_up_proj_scales: expert 0: expected finite"):
        empty.process_weights_after_loading()
