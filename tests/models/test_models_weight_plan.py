"""Which layers are quantized, architecture by architecture."""

import logging
import re

import pytest

from halfbyte.checkpoints.dialects import CheckpointError
from halfbyte.models import UnsupportedModelError
from halfbyte.models.weight_plan import plan_weights
from models.zoo import ARCHITECTURES, make_model

Shapes = dict[str, tuple[int, ...]]


def stored(model: object) -> Shapes:
    """Names and shapes as `save_pretrained` writes them."""
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():  # type: ignore[attr-defined]
        match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if match and type(model).__name__.startswith("Qwen3Moe"):
            experts, n, k = tensor.shape
            for expert in range(experts):
                for part in ("gate_proj", "up_proj") if n == 96 else ("down_proj",):
                    rows = n // 2 if n == 96 else n
                    shapes[f"{match[1]}.{expert}.{part}.weight"] = (rows, k)
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes


LINEARS = {
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "gpt_oss": {f"self_attn.{x}_proj" for x in "qkvo"},
    "qwen3_moe": {f"self_attn.{x}_proj" for x in "qkvo"}
    | {f"mlp.experts.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")},
}
DENSE = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
KEPT = {
    "gpt_oss": {"mlp.router", "mlp.experts"},
    "qwen3_moe": {"mlp.gate"},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plan_of_architectures(architecture: str) -> None:
    model = make_model(architecture)
    plan = plan_weights(model.config, stored(model))
    linears = LINEARS.get(architecture, DENSE)
    assert set(plan.modules) == {f"model.layers.{i}.{name}" for i in range(4) for name in linears}
    kept = {f"model.layers.{i}.{name}" for i in range(4) for name in KEPT.get(architecture, ())}
    assert set(plan.ignore) == kept | {"lm_head"}
    assert plan.attentions == tuple(f"model.layers.{i}.self_attn" for i in range(4))


def test_plan_groups_what_engines_fuse() -> None:
    model = make_model("llama")
    groups = [set(group) for group in plan_weights(model.config, stored(model)).groups]
    layer = "model.layers.2"
    assert {f"{layer}.self_attn.{x}_proj" for x in "qkv"} in groups
    assert {f"{layer}.mlp.{x}_proj" for x in ("gate", "up")} in groups
    assert {f"{layer}.self_attn.o_proj"} in groups
    assert {f"{layer}.mlp.down_proj"} in groups
    assert len(groups) == 16


def test_plan_groups_gate_and_up_of_each_expert() -> None:
    model = make_model("qwen3_moe")
    groups = [set(group) for group in plan_weights(model.config, stored(model)).groups]
    for expert in range(4):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert {f"{prefix}.gate_proj", f"{prefix}.up_proj"} in groups
        assert {f"{prefix}.down_proj"} in groups


def test_plan_ignores_a_tied_head() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    shapes = stored(model)
    del shapes["lm_head.weight"]  # files hold the embedding alone
    assert plan_weights(model.config, shapes).ignore == ("lm_head",)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.mlp.down_proj",
        "*.1.*.down_proj",
        r"re:.*layers\.1\..*down",
    ],
)
def test_plan_ignore_patterns(pattern: str) -> None:
    model = make_model("llama")
    plan = plan_weights(model.config, stored(model), [pattern])
    assert set(plan.ignore) == {"model.layers.1.mlp.down_proj", "lm_head"}
    assert len(plan.modules) == 27


def test_plan_ignores_all_below_a_module() -> None:
    model = make_model("llama")
    plan = plan_weights(model.config, stored(model), ["model.layers.1"])
    assert len(plan.ignore) == 8
    assert len(plan.modules) == 21


@pytest.mark.parametrize("pattern", ["lm_head", "model.layers.1.mlp.down", "*.nothing.*"])
def test_plan_refuses_patterns_that_match_nothing(pattern: str) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=rf"ignore: '{re.escape(pattern)}' matches no linear"):
        plan_weights(model.config, stored(model), [pattern])


def test_plan_refuses_broken_expressions() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"ignore: 're:\(' is no regular expression"):
        plan_weights(model.config, stored(model), ["re:("])


def test_plan_warns_of_a_split_group(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    plan_weights(model.config, stored(model), ["*.q_proj"])
    assert "only part of the layers that engines fuse with it is quantized" in caplog.text


def test_plan_leaves_sizes_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama", intermediate_size=88)
    with caplog.at_level(logging.WARNING, "halfbyte"):
        plan = plan_weights(model.config, stored(model))
    down = {f"model.layers.{i}.mlp.down_proj" for i in range(4)}
    assert set(plan.ignore) == down | {"lm_head"}
    assert "model.layers.3.mlp.down_proj: left unquantized, its 88 input features" in caplog.text


def test_plan_names_a_wrong_shape() -> None:
    model = make_model("llama")
    shapes = stored(model)
    shapes["model.layers.1.self_attn.k_proj.weight"] = (32, 48)
    with pytest.raises(
        CheckpointError,
        match=r"^model.layers.1.self_attn.k_proj.weight: expected \[32, 64\], found \[32, 48\]$",
    ):
        plan_weights(model.config, shapes)


def test_plan_needs_something_to_quantize() -> None:
    model = make_model("llama")
    with pytest.raises(CheckpointError, match="no linear layer"):
        plan_weights(model.config, {"lm_head.weight": (131, 64)})
    with pytest.raises(CheckpointError, match="no linear layer"):
        plan_weights(model.config, stored(model), ["model.layers"])


def test_plan_refuses_unsupported_models() -> None:
    from transformers import StableLmConfig

    with pytest.raises(UnsupportedModelError, match="stablelm"):
        plan_weights(StableLmConfig(), {})
