"""Gate and top-k of vLLM's MoE layers as one call."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config import set_current_vllm_config as in_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.linear import ReplicatedLinear

from halfbyte.moe import moe_experts, route_reference
from halfbyte.plugins.vllm import moe_method, moe_router
from halfbyte.plugins.vllm.moe_router import GateAndTopK, LaterGate, fuse_router
from moe.cases import random_experts, random_hidden
from plugins.vllm.engine.moe_layers import E, H, I, load, make_runner

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24 routes elsewhere on CPUs."""
    monkeypatch.setattr(moe_method, "_routes", lambda: False)


def make(
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    scoring: str = "softmax",
    has_gate: bool = True,
    fuse: bool = True,
    **options: Any,
) -> Any:
    """A runner with a gate and the router that vLLM has on GPUs."""
    with in_config(VllmConfig()):
        gate = ReplicatedLinear(
            H, E, bias=bias, params_dtype=dtype, prefix="model.layers.0.mlp.gate"
        )
    torch.nn.init.normal_(gate.weight)
    runner = make_runner(gate=gate if has_gate else None, params_dtype=dtype, **options)
    runner.gate = gate if has_gate else None
    runner.router = FusedTopKRouter(2, E, scoring, True)
    if fuse:
        fuse_router(runner)
    return runner


def call(runner: Any, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """The runner's own forward pass."""
    with set_forward_context(None, VllmConfig(), num_tokens=len(x)):
        get_forward_context().is_padding = padding
        result: torch.Tensor = runner._forward_impl(x, x, None)
        return result


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("skips", ["0", "1"])
def test_result(monkeypatch: pytest.MonkeyPatch, has_padding: bool, skips: str) -> None:
    """vLLM 0.24 has no mask of padding."""
    monkeypatch.setattr(moe_router, "fits_kernel", lambda *_: True)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", skips)
    runner, experts = make(), random_experts(E, H, I, dtype=torch.bfloat16)
    load(runner.routed_experts, experts)
    assert isinstance(runner.router, GateAndTopK)
    x = random_hidden(9, H, torch.bfloat16)
    padding = torch.arange(12) >= 6 if has_padding else None
    has_mask = hasattr(fused_topk_router, "_get_padding_mask") and skips == "1"
    own = padding[:9] if padding is not None and has_mask else None
    weights, ids = route_reference(x, runner.router.gate.weight, 2, padding=own)
    expected = moe_experts(x, experts, ids, weights, backend="cpu")
    assert torch.equal(call(runner, x, padding), expected)


def test_runners_are_changed_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(moe_router, "fuse_router", made.append)
    runner = make()
    assert made == [runner]


def test_gate_s_weights_stay_the_model_s() -> None:
    runner = make()
    assert isinstance(runner.gate, LaterGate)
    assert not [name for name, _ in runner.named_parameters() if "gate.weight" in name]


def test_long_prompts_keep_vllm_s_router(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make()
    x = random_hidden(9, H, torch.bfloat16)
    seen = []

    def compute(self: Any, hidden: torch.Tensor, logits: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append((hidden, logits))
        return torch.zeros(9, 2), torch.zeros(9, 2, dtype=torch.int32)

    monkeypatch.setattr(FusedTopKRouter, "_compute_routing", compute)
    monkeypatch.setattr(runner.router.gate, "forward", lambda x: (x[:, :E] * 2, None))
    runner.router.select_experts(x, x)
    ((hidden, logits),) = seen
    assert hidden is x
    assert torch.equal(logits, x[:, :E] * 2)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"bias": True},
        {"scoring": "sigmoid"},
        {"has_gate": False},
        {"out_dtype": torch.float32},
        {"joins_gates": True},
        {"batch_invariant": True},
        {"method": None},
    ],
    ids=str,
)
def test_what_keeps_vllm_s_router(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_router, "batch_invariant", lambda: "batch_invariant" in options)
    own = {
        name: options[name] for name in ("dtype", "bias", "scoring", "has_gate") if name in options
    }
    runner = make(**own, fuse=False)
    if "out_dtype" in options:
        runner.gate.out_dtype = options["out_dtype"]
    if "joins_gates" in options:
        runner._fse_fuse_gate = True
    if "method" in options:
        monkeypatch.setattr(moe_router, "HalfbyteMoeMethod", type(None))
    fuse_router(runner)
    assert not isinstance(runner.router, GateAndTopK)
    assert not isinstance(runner.gate, LaterGate)


def test_the_same_is_fused_otherwise() -> None:
    assert isinstance(make().router, GateAndTopK)
