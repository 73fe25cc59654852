"""Experts of other shapes and numbers than a layer's, which vLLM would load without a message."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig

from checkpoints.mxfp4_folders import make_gpt_oss
from halfbyte.plugins.vllm import stored_experts
from halfbyte.plugins.vllm.stored_experts import StoredExperts, check_top_k
from plugins.vllm.engine.moe_checkpoints import make_nvfp4

LAYER = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def moe_of(folder: Path) -> Any:
    """The sizes of a checkpoint's layers, as vLLM's `FusedMoEConfig` has them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    size = getattr(config, "moe_intermediate_size", config.intermediate_size)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    return SimpleNamespace(
        num_experts=experts, hidden_dim=config.hidden_size, intermediate_size=size
    )


def stored(folder: Path, load_format: str = "auto") -> StoredExperts | None:
    model = SimpleNamespace(model=str(folder), revision=None)
    load = LoadConfig(load_format=load_format)
    return StoredExperts.of(SimpleNamespace(model_config=model, load_config=load))


def check(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Compare the second layer, as it is and changed."""
    moe = moe_of(folder)
    weight_format: Any = "mxfp4" if "gpt" in folder.name else "nvfp4"
    before = stored(folder)
    assert before is not None
    before.check(LAYER, moe, weight_format)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    after = stored(folder)
    assert after is not None
    assert after is not before
    after.check(LAYER, moe, weight_format)


def cut(name: str, index: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{name}"] = tensors[f"{LAYER}.{name}"][index]

    return change


def add_expert(number: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = f"{LAYER}.0.up_proj.weight"
        tensors[name.replace(".0.", f".{number}.")] = tensors[name].clone()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("2.up_proj.weight", slice(16)), r"expert 2: up_proj.weight: expected shape .* found"),
        (
            cut("0.down_proj.weight", (slice(None), slice(8))),
            r"expert 0: down_proj.weight: expected shape .*, found \[\d+, 8\]",
        ),
        (
            cut("1.gate_proj.weight_scale", slice(8)),
            r"expert 1: gate_proj.weight_scale: .*, found \[8, \d+\]",
        ),
        (add_expert(9), "expected experts 0 to 3, found 9"),
        (add_expert(-1), "expected experts 0 to 3, found -1"),
    ],
)
def test_nvfp4(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    folder = make_nvfp4(tmp_path, "qwen3_moe", "modelopt", "nvfp4-a16")
    with pytest.raises(ValueError, match=f"^{LAYER}: {message}"):
        check(folder, change)


@pytest.mark.parametrize("name", ["gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"])
def test_gpt_oss(tmp_path: Path, name: str) -> None:
    folder = make_gpt_oss(tmp_path / "gpt_oss")
    with pytest.raises(ValueError, match=rf"^{LAYER}: {name}: expected shape .*, found \[3, "):
        check(folder, cut(name, slice(3)))


def test_what_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy weights, other files, names that the layer does not have."""
    assert stored(tmp_path, "dummy") is None
    assert stored(tmp_path) is None
    assert stored(tmp_path / "absent") is None
    (tmp_path / "config.json").write_text("{}")
    assert stored(tmp_path) is None
    save_file({"other.0.w1.weight": torch.zeros(1, 2)}, tmp_path / "model.safetensors")
    found = stored(tmp_path)
    assert found is not None
    sizes = SimpleNamespace(num_experts=4, hidden_dim=64, intermediate_size=64)
    found.check(LAYER, sizes, "nvfp4")
    monkeypatch.setattr(stored_experts, "CheckpointIndex", None)
    assert stored(tmp_path) is found  # read once


def test_more_experts_per_token_than_there_are() -> None:
    check_top_k(LAYER, SimpleNamespace(num_experts=4, experts_per_token=4))
    with pytest.raises(ValueError, match=f"^{LAYER}: expected 1 to 4 experts per token, found 5$"):
        check_top_k(LAYER, SimpleNamespace(num_experts=4, experts_per_token=5))
