"""Which layers are quantized, architecture by architecture."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex, TensorEntry
from halfbyte.models import UnsupportedModelError
from halfbyte.quantization.select_layers import LayerSelection, select_layers
from models.zoo import ARCHITECTURES, make_model

Shapes = dict[str, tuple[int, ...]]


def stored(model: object) -> Shapes:
    """Names and shapes as `save_pretrained` writes them."""
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():  # type: ignore[attr-defined]
        match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if match and type(model).__name__.startswith(("Qwen3Moe", "Qwen2Moe", "Mixtral")):
            experts, n, k = tensor.shape
            for expert in range(experts):
                gated = match[2] == "gate_up_proj"
                for part in ("gate_proj", "up_proj") if gated else ("down_proj",):
                    rows = n // 2 if gated else n
                    shapes[f"{match[1]}.{expert}.{part}.weight"] = (rows, k)
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes


def index_of(shapes: Shapes) -> CheckpointIndex:
    file = Path("folder/model.safetensors")
    tensors = {name: TensorEntry("BF16", shape, file) for name, shape in shapes.items()}
    return CheckpointIndex(file.parent, tensors)


def selection_of(
    model: Any, ignore: Sequence[str] = (), shapes: Shapes | None = None
) -> LayerSelection:
    """The selection for a model's own files, or for given ones."""
    return select_layers(
        model.config, index_of(stored(model) if shapes is None else shapes), ignore
    )


EXPERTS = {f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.experts.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")
}
LINEARS = {
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "gpt_oss": {f"self_attn.{x}_proj" for x in "qkvo"},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | {f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "qwen3_moe": EXPERTS,
}
DENSE = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
KEPT = {
    "gpt_oss": {"mlp.router", "mlp.experts"},
    "mixtral": {"mlp.gate"},
    "qwen2_moe": {"mlp.gate", "mlp.shared_expert_gate"},
    "qwen3_moe": {"mlp.gate"},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_architectures(architecture: str) -> None:
    model = make_model(architecture)
    found = selection_of(model)
    linears = LINEARS.get(architecture, DENSE)
    assert set(found.modules) == {f"model.layers.{i}.{name}" for i in range(4) for name in linears}
    kept = {f"model.layers.{i}.{name}" for i in range(4) for name in KEPT.get(architecture, ())}
    assert set(found.ignore) == kept | {"lm_head"}
    assert found.attentions == tuple(f"model.layers.{i}.self_attn" for i in range(4))


def test_selection_groups_what_engines_fuse() -> None:
    model = make_model("llama")
    groups = [set(group) for group in selection_of(model).groups]
    layer = "model.layers.2"
    assert {f"{layer}.self_attn.{x}_proj" for x in "qkv"} in groups
    assert {f"{layer}.mlp.{x}_proj" for x in ("gate", "up")} in groups
    assert {f"{layer}.self_attn.o_proj"} in groups
    assert {f"{layer}.mlp.down_proj"} in groups
    assert len(groups) == 16


def test_selection_groups_gate_and_up_of_each_expert() -> None:
    model = make_model("qwen3_moe")
    groups = [set(group) for group in selection_of(model).groups]
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert {f"{prefix}.gate_proj", f"{prefix}.up_proj"} in groups
        assert {f"{prefix}.down_proj"} in groups


def test_selection_ignores_a_tied_head() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    shapes = stored(model)
    del shapes["lm_head.weight"]  # files hold the embedding alone
    assert selection_of(model, shapes=shapes).ignore == ("lm_head",)
    shapes["lm_head.weight"] = shapes.pop("model.embed_tokens.weight")  # or the head alone
    assert selection_of(model, shapes=shapes).ignore == ("lm_head",)
    del shapes["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"expected BF16/F16/F32 \[131, 64\], found no such"):
        selection_of(model, shapes=shapes)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.mlp.down_proj",
        "*.1.*.down_proj",
        r"re:.*layers\.1\..*down",
    ],
)
def test_selection_ignore_patterns(pattern: str) -> None:
    model = make_model("llama")
    found = selection_of(model, [pattern])
    assert set(found.ignore) == {"model.layers.1.mlp.down_proj", "lm_head"}
    assert len(found.modules) == 27


def test_selection_ignores_all_below_a_module() -> None:
    model = make_model("llama")
    found = selection_of(model, ["model.layers.1"])
    assert len(found.ignore) == 8
    assert len(found.modules) == 21


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [
        ("llama", "lm_head"),
        ("llama", "model.embed_tokens"),
        ("llama", "*_layernorm"),
        ("llama", "re:lm_head$"),
        ("qwen3_moe", "re:.*mlp.gate$"),
        ("gpt_oss", "re:.*router"),
        ("gpt_oss", "*.experts"),  # which the file fuses
    ],
)
def test_selection_takes_patterns_of_unquantized_modules(architecture: str, pattern: str) -> None:
    model = make_model(architecture)
    assert selection_of(model, [pattern]) == selection_of(model)


# The last ones match modules, but none of the layers in them: they would change nothing.
@pytest.mark.parametrize(
    "pattern",
    ["model.layers.1.mlp.down", "*.nothing.*", "lm_head.weight", "", "*.mlp", r"re:.*layers\.1$"],
)
def test_selection_refuses_patterns_that_match_nothing(pattern: str) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=f"^ignore: {re.escape(repr(pattern))} matches no linear"):
        selection_of(model, [pattern])


def test_selection_refuses_broken_expressions() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"ignore: 're:\(' is no regular expression"):
        selection_of(model, ["re:("])


def test_selection_warns_of_a_split_group(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    selection_of(model, ["*.q_proj"])
    assert "only part of the layers that engines fuse with it is quantized" in caplog.text


def test_selection_takes_all_experts_of_a_layer_or_none() -> None:
    model = make_model("qwen3_moe")
    expert = "model.layers.1.mlp.experts.2.up_proj"
    for pattern in (expert, "*.experts.2.*"):
        with pytest.raises(
            ValueError, match=r"^ignore: model\.layers\.\d\.mlp\.experts\.2\.\w+ would"
        ):
            selection_of(model, [pattern])
    found = selection_of(model, ["model.layers.1.mlp.experts"])
    assert len(found.modules) == 64 - 12


def test_selection_leaves_experts_that_do_not_fit_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("qwen3_moe", moe_intermediate_size=40)
    with caplog.at_level(logging.WARNING, "halfbyte"):
        found = selection_of(model)
    assert not any(".experts." in module for module in found.modules)
    assert len(found.modules) == 16
    assert caplog.messages == [  # gate and up would fit
        f"model.layers.{i}: left unquantized, because input features are not a multiple of 16: "
        "mlp.experts (all experts, because down_proj has 40)"
        for i in range(4)
    ]


def test_selection_leaves_sizes_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama", intermediate_size=88)
    with caplog.at_level(logging.WARNING, "halfbyte"):
        found = selection_of(model)
    down = {f"model.layers.{i}.mlp.down_proj" for i in range(4)}
    assert set(found.ignore) == down | {"lm_head"}
    assert caplog.messages == [
        f"model.layers.{i}: left unquantized, because input features are not a multiple of 16: "
        "mlp.down_proj (88)"
        for i in range(4)
    ]


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight", "[96, 64]"),
        ("llama", "model.layers.0.input_layernorm.weight", "[64]"),
        ("llama", "model.norm.weight", "[64]"),
        ("llama", "model.embed_tokens.weight", "[131, 64]"),
        ("llama", "lm_head.weight", "[131, 64]"),  # not tied here
        ("qwen2", "model.layers.1.self_attn.q_proj.bias", "[64]"),
        ("gpt_oss", "model.layers.3.self_attn.sinks", "[4]"),
        ("gpt_oss", "model.layers.3.mlp.experts.gate_up_proj", "[4, 64, 192]"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight", "[4, 64]"),
        ("qwen3_moe", f"{EXPERT}.weight", "[48, 64]"),
    ],
)
def test_selection_names_an_absent_weight(architecture: str, name: str, expected: str) -> None:
    model = make_model(architecture)
    shapes = stored(model)
    del shapes[name]
    message = f"folder: {name}: expected BF16/F16/F32 {expected}, found no such tensor"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        selection_of(model, shapes=shapes)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "model.norm.weight"),
        ("qwen3_moe", f"{EXPERT}.weight"),
    ],
)
def test_selection_names_a_wrong_shape(architecture: str, name: str) -> None:
    model = make_model(architecture)
    shapes = stored(model)
    expected, shapes[name] = list(shapes[name]), (32, 48)
    message = f"folder: {name}: expected BF16/F16/F32 {expected}, found BF16 [32, 48]"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        selection_of(model, shapes=shapes)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "visual.weight"),
        ("llama", "model.norm.bias"),
        ("llama", "lm_head.bias"),
        ("llama", "model.layers.9.mlp.up_proj.weight"),
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.layers.1.self_attn.k_proj.k_scale"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.other_proj.weight"),
    ],
)
def test_selection_passes_over_foreign_tensors(architecture: str, name: str) -> None:
    """Loading ignores them, too."""
    model = make_model(architecture)
    assert selection_of(model, shapes={**stored(model), name: (64, 64)}) == selection_of(model)


@pytest.mark.parametrize(
    ("architecture", "name", "message"),
    [
        (
            "llama",
            "model.layers.1.mlp.up_proj.bias",
            "expected no such tensor beside a weight to quantize, found BF16 [48, 64]",
        ),
        (
            "qwen3_moe",
            f"{EXPERT}.bias",
            "expected no such tensor beside a weight to quantize, found BF16 [48, 64]",
        ),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.4.up_proj.weight",
            "expected 4 experts, found BF16 [48, 64] of number 4",
        ),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.-1.up_proj.weight",
            "expected 4 experts, found BF16 [48, 64] of number -1",
        ),
        (
            "llama",
            "model.layers.1.mlp.up_proj.weight_scale",
            "expected no tensor of quantized weights in this layer, found BF16 [48, 64]",
        ),
    ],
)
def test_selection_refuses_surplus_tensors(architecture: str, name: str, message: str) -> None:
    model = make_model(architecture)
    with pytest.raises(CheckpointError, match=f"^folder: {re.escape(f'{name}: {message}')}$"):
        selection_of(model, shapes={**stored(model), name: (48, 64)})


def test_selection_ignores_a_foreign_bias_of_an_ignored_layer() -> None:
    model = make_model("llama")
    layer = "model.layers.1.mlp.up_proj"
    found = selection_of(model, [layer], {**stored(model), f"{layer}.bias": (96,)})
    assert layer in found.ignore


def test_selection_needs_something_to_quantize() -> None:
    with pytest.raises(CheckpointError, match="no linear layer"):
        selection_of(make_model("llama", hidden_size=40, intermediate_size=88))
    with pytest.raises(CheckpointError, match="no linear layer"):
        selection_of(make_model("llama"), ["model.layers"])


def test_selection_refuses_unsupported_models() -> None:
    from transformers import StableLmConfig

    with pytest.raises(UnsupportedModelError, match="stablelm"):
        select_layers(StableLmConfig(), index_of({}))


@pytest.mark.parametrize("section", ["None", 3, {"a": 1}])
def test_selection_refuses_configs_that_make_no_model(section: object) -> None:
    model = make_model("qwen3")
    index = index_of(stored(model))
    model.config.text_config = section
    with pytest.raises(CheckpointError, match=r"cannot build a model from it: .*to_dict"):
        select_layers(model.config, index)
