"""Calibration: max magnitudes of layers' inputs, and of K and V."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.models import calibrate
from halfbyte.quantization import calibrate_layers as subject
from halfbyte.quantization.calibrate_layers import calibrate_layers
from models.zoo import make_model, token_ids


def linears(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]


@contextmanager
def watched(model: nn.Module, names: list[str]) -> Iterator[dict[str, float]]:
    """The same with forward hooks: the max input of each module."""
    seen = dict.fromkeys(names, 0.0)
    handles = []
    for name in names:

        def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            seen[name] = max(seen[name], float(args[0].abs().max()))

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3_text", "gpt_oss"])
def test_input_amax_is_what_hooks_see(architecture: str) -> None:
    model = make_model(architecture)
    names = linears(model)
    with watched(model, names) as seen:
        result = calibrate_layers(model, token_ids(1, 40), names, "test")
    assert set(result.input_amax) == set(names)
    assert all(seen.values())
    assert dict(result.input_amax) == seen
    assert result.source == "test"


def test_input_amax_over_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The max over all windows, each run separately; for K and V, too."""
    monkeypatch.setattr(subject, "MAX_TOKENS", 24)
    model = make_model("llama")
    ids = token_ids(1, 60)
    progress: list[tuple[int, int]] = []
    names = linears(model)
    with watched(model, names) as seen:
        result = calibrate_layers(
            model, ids, names, "test", lambda done, total: progress.append((done, total))
        )
    assert progress == [(24, 60), (48, 60), (60, 60)]
    assert dict(result.input_amax) == seen
    pieces = [calibrate(model, piece, "", headroom=1.0) for piece in ids.split(24, dim=1)]
    for layer, (k_amax, v_amax) in enumerate(result.kv_amax):
        assert k_amax == max(piece.k_amax[layer] for piece in pieces)
        assert v_amax == max(piece.v_amax[layer] for piece in pieces)
    assert len(result.kv_amax) == 4


def test_experts_share_their_input_amax() -> None:
    """gate and up of all experts share the experts' input, down the intermediate activations."""
    model = make_model("qwen3_moe")
    prefix = "model.layers.1.mlp.experts"
    names = [f"{prefix}.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")]
    experts = model.get_submodule(prefix)
    with watched(model, [prefix]) as seen:
        result = calibrate_layers(model, token_ids(1, 40), names, "test")
    for e in range(4):
        assert result.input_amax[f"{prefix}.{e}.gate_proj"] == seen[prefix]
        assert result.input_amax[f"{prefix}.{e}.up_proj"] == seen[prefix]
    between = largest_between(model, experts, token_ids(1, 40))
    for e in range(4):
        assert result.input_amax[f"{prefix}.{e}.down_proj"] == pytest.approx(between, rel=1e-4)


def largest_between(model: nn.Module, experts: Any, ids: torch.Tensor) -> float:
    """Largest input of any expert's down projection, from the experts' own inputs."""
    largest = 0.0

    def note(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal largest
        x, chosen = args[0], args[1]
        for expert in range(4):
            rows = x[(chosen == expert).any(-1)]
            gate, up = (rows @ experts.gate_up_proj[expert].T).chunk(2, -1)
            if len(rows):
                largest = max(largest, float((nn.functional.silu(gate) * up).abs().max()))

    handle = experts.register_forward_pre_hook(note)
    with torch.inference_mode():
        model(ids)
    handle.remove()
    return largest


def test_calibration_leaves_the_model_as_it_was() -> None:
    model = make_model("qwen3_moe")
    before = (model.config._experts_implementation, model.config._attn_implementation)
    calibrate_layers(model, token_ids(1, 20), linears(model), "test")
    after = (model.config._experts_implementation, model.config._attn_implementation)
    assert after == before
    assert not model.training


def test_calibration_refuses_what_is_not_finite() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] = math.inf
    with pytest.raises(CheckpointError, match=r"^model.layers.3.mlp.down_proj: expected a finite"):
        calibrate_layers(model, token_ids(1, 20), linears(model), "test")


def test_calibration_names_a_layer_that_was_not_reached() -> None:
    model = make_model("llama")
    model.unused = nn.Linear(16, 16)
    with pytest.raises(CheckpointError, match=r"^unused: .*no token of the text was routed to it"):
        calibrate_layers(model, token_ids(1, 20), ["unused"], "test")
