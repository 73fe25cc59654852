"""The benchmark of experts calls vLLM's functions with arguments that they take.

Their kernels need a GPU, so the functions are only compared by their signatures here.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.peers import humming_moe
from benchmarks.peers.moe import MOE_PEERS
from halfbyte.bench import MoeShape
from halfbyte.bench.moe import RandomExperts

CPU = torch.device("cpu")
NVFP4, MXFP4 = MoeShape(4, 2, 128, 64), MoeShape(3, 2, 192, 96, "mxfp4")
LAYERS = "vllm.model_executor.layers"
MARLIN = f"{LAYERS}.quantization.utils.marlin_utils"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Replaces a function by one with its signature, and returns the arguments of all calls."""

    def replace(module: str, name: str, result: Any = None) -> list[dict[str, Any]]:
        signature, calls = inspect.signature(getattr(import_module(module), name)), []

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(signature.bind(*arguments, **named).arguments)
            return result

        monkeypatch.setattr(import_module(module), name, call)
        return calls

    return replace


def one_call(name: str, shape: MoeShape) -> torch.Tensor:
    experts = RandomExperts(shape, CPU, torch.bfloat16)
    config = shape.config(torch.bfloat16, CPU)
    assert MOE_PEERS.get(name).can_implement(config)[0]
    result: torch.Tensor = MOE_PEERS.get(name)(config).calls(experts, experts.x(3))[0]()
    return result


@pytest.mark.parametrize("shape", [NVFP4, MXFP4], ids=str)
def test_marlin(fits: Any, shape: MoeShape) -> None:
    names = {
        NVFP4: "prepare_nvfp4_moe_layer_for_marlin",
        MXFP4: "prepare_moe_mxfp4_layer_for_marlin",
    }
    fits(MARLIN, "marlin_make_workspace_new", torch.zeros(4))
    prepared = fits(f"{MARLIN}_fp4", names[shape], [torch.zeros(1)] * 6)
    calls = fits(f"{LAYERS}.fused_moe.experts.marlin_moe", "fused_marlin_moe")
    assert one_call("vllm_marlin", shape).shape == (3, shape.hidden_size)
    assert len(prepared) == len(calls) == 1
    rows, columns = prepared[0]["w13"].shape[1:]
    padded = {NVFP4: (128, 64), MXFP4: (2 * 128, 256 // 2)}  # I and H as vLLM pads MXFP4
    assert (rows, columns) == padded[shape]
    assert calls[0]["hidden_states"].shape == (3, 2 * columns)
    assert calls[0]["topk_ids"].dtype == torch.int32
    assert calls[0]["activation"].value == {NVFP4: "silu", MXFP4: "swigluoai"}[shape]
    assert ("global_scale1" in calls[0]) == (shape == NVFP4)


@pytest.mark.parametrize("shape", [NVFP4, MXFP4], ids=str)
def test_bfloat16(fits: Any, shape: MoeShape) -> None:
    calls = fits(f"{LAYERS}.fused_moe.fused_moe", "fused_experts", torch.zeros(3, 1))
    one_call("vllm_bf16", shape)
    (found,) = calls
    assert found["w1"].shape == (
        shape.num_experts,
        2 * shape.intermediate_size,
        shape.hidden_size,
    )
    config = found["quant_config"]
    assert (config.w1_bias is not None) == (config.w2_bias is not None) == (shape == MXFP4)


def test_triton_kernels(fits: Any) -> None:
    module = f"{LAYERS}.fused_moe.experts.gpt_oss_triton_kernels_moe"
    routings = fits(module, "make_routing_data", (1, 2, 3))
    calls = fits(module, "triton_kernel_fused_experts")
    peer = MOE_PEERS.get("triton_kernels")(MXFP4.config(torch.bfloat16, CPU))
    form = dict.fromkeys(("w1", "w2", "quant_config"))
    peer.apply(form, torch.zeros(3, 192), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    assert routings[0]["num_local_experts"] == 3
    assert [calls[0][name] for name in ("routing_data", "gather_indx", "scatter_indx")] == [1, 2, 3]
    assert calls[0]["topk"] == 2
    config = import_module(f"{LAYERS}.fused_moe.config").mxfp4_w4a16_moe_quant_config
    assert list(inspect.signature(config).parameters)[:4] == [
        "w1_scale",
        "w2_scale",
        "w1_bias",
        "w2_bias",
    ]


def test_what_is_around_humming(fits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{LAYERS}.fused_moe"
    sorts = fits(f"{module}.moe_align_block_size", "moe_align_block_size", (1, 2, 3))
    activations = fits(f"{module}.activation", "apply_moe_activation")
    sums = fits(f"{module}.moe_fused_mul_sum", "moe_fused_mul_sum")
    products = []

    def product(blocks: Any, matrices: Any, x: Any, out: Any, top_k: int, locks: Any) -> None:
        products.append((matrices, tuple(x.shape), tuple(out.shape), top_k))
        assert blocks._blocks(16) == blocks._blocks(16) == (1, 2, 3)

    monkeypatch.setattr(humming_moe._Sorted, "product", product)
    peer = MOE_PEERS.get("humming")(MXFP4.config(torch.bfloat16, CPU))
    form = {"gate_up": "gate_up", "down": "down", "locks": None}
    ids = torch.zeros(3, 2, dtype=torch.int32)
    assert peer.apply(form, torch.zeros(3, 192), ids, torch.ones(3, 2)).shape == (3, 192)
    assert products == [("gate_up", (3, 192), (6, 192), 2), ("down", (6, 96), (6, 192), 1)]
    assert len(sorts) == len(activations) == len(sums) == 1
    assert sums[0]["inputs"].shape == (3, 2, 192)
