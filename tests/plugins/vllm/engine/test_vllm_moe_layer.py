"""A single vLLM MoE layer on halfbyte's kernels: ranks, scales and errors."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

import cuda_on_host
from halfbyte.dispatch import Answer
from halfbyte.moe import GatedActivation, MoeConfig, PackedExperts, moe_experts
from halfbyte.moe.as_loaded import AsLoadedKernel, from_tensors
from halfbyte.moe.cuda.kernel import CudaKernel
from halfbyte.plugins.vllm import moe_method
from halfbyte.plugins.vllm.moe import _warn_overruled
from halfbyte.plugins.vllm.moe_method import HalfbyteMoeMethod, _log_choice
from moe.cases import assert_close_enough, random_experts, random_hidden, random_routing
from moe.test_moe_cuda_on_host import run as run_on_host
from plugins.vllm.engine.moe_layers import (
    E,
    H,
    I,
    gpt_oss_experts,
    load,
    load_gpt_oss,
    make_gpt_oss,
    make_layer,
    ranks_of,
    run,
)

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize(
    "sizes",
    [
        [{"use_ep": True, "ep_size": 2, "ep_rank": rank} for rank in range(2)],
        [{"tp_size": 2, "tp_rank": rank} for rank in range(2)],  # 48 features each
        [{"tp_size": 6, "tp_rank": rank} for rank in range(6)],  # 16 features each
    ],
    ids=["expert-parallel", "two-ranks", "six-ranks"],
)
def test_ranks_add_up_to_all_experts(
    sizes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global scales differ by expert, and between gate and up."""
    experts = random_experts(E, H, I)
    x, (ids, weights) = random_hidden(9, H), random_routing(9, 2, E)
    ids[3, 1] = -1  # padding of vLLM's routers
    total = torch.zeros_like(x)
    for rank in sizes:
        with ranks_of(monkeypatch, **rank):
            layer = make_layer()
        load(layer, experts)
        assert isinstance(layer.quant_method, HalfbyteMoeMethod)
        result = run(layer, x, ids.int(), weights)
        if "ep_rank" in rank:
            assert layer.local_num_experts == (3 if rank["ep_rank"] == 0 else 2)
            own = (ids < 3) if rank["ep_rank"] == 0 else (ids >= 3)
            masked = torch.where(own, ids, -1)
            alone = moe_experts(x, experts, masked, weights, backend="cpu")
            assert torch.equal(result, alone)
        total += result
    expected = moe_experts(x, experts, ids, weights, backend="reference")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_parameters_of_vllm_are_released() -> None:
    layer = make_layer()
    assert layer.w13_weight.shape == (E, 2 * I, H // 2)
    load(layer, random_experts(E, H, I))
    names = [name for name, _ in layer.named_parameters()]
    assert names
    assert not [name for name in names if name.startswith("w")]


def test_dummy_weights_are_numbers() -> None:
    """Scales of vLLM's dummies may be NaN, negative or 0."""
    layer = make_layer(load_format="dummy")
    for name, parameter in layer.named_parameters():
        if name.endswith("weight"):
            parameter.data.random_(0, 256)
        else:
            parameter.data.copy_(torch.full(parameter.shape, torch.nan))
    layer.quant_method.process_weights_after_loading(layer)
    result = run(layer, random_hidden(9, H), *random_routing(9, 2, E))
    assert bool(result.isfinite().all())
    assert bool(result.abs().amax() > 0)


def test_router_weights_on_the_input() -> None:
    """As in Llama 4: the router's weight multiplies the expert's input."""
    experts = random_experts(E, H, I)
    x, (ids, _) = random_hidden(7, H), random_routing(7, 1, E)
    weights = torch.linspace(0.1, 0.9, 7)[:, None]
    layer = make_layer(top_k=1, apply_router_weight_on_input=True)
    load(layer, experts)
    expected = moe_experts(x * weights, experts, ids, torch.ones_like(weights))
    torch.testing.assert_close(run(layer, x, ids.int(), weights), expected)
    with pytest.raises(ValueError, match="expected one expert per token, got 2"):
        run(layer, x, *random_routing(7, 2, E))


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"swiglu_limit": 1.5}, GatedActivation(limit=1.5)),
        (
            {
                "activation": "swigluoai_uninterleave",
                "swiglu_limit": 1.5,
                "swiglu_alpha": 1.702,
                "swiglu_beta": 1.0,
            },
            GatedActivation(1.702, 1.5, 1.0),
        ),
    ],
    ids=["clamped", "gpt-oss-s"],
)
def test_activations(options: dict[str, Any], activation: GatedActivation) -> None:
    experts = random_experts(E, H, I, activation=activation)
    x, (ids, weights) = random_hidden(9, H), random_routing(9, 2, E)
    layer = make_layer(**options)
    load(layer, experts)
    expected = moe_experts(x, experts, ids, weights, backend="reference")
    torch.testing.assert_close(run(layer, x, ids, weights), expected, rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"activation": "gelu"}, {}, "the activation gelu"),
    ({"intermediate_size": 104}, {}, "intermediate_size: expected a positive multiple of 16"),
    ({"has_bias": True}, {}, "experts with biases"),
    ({"lora": True}, {}, "LoRA with experts"),
    ({}, {"enable_eplb": True}, "--enable-eplb"),
    ({}, {"dp_size": 2, "use_ep": True, "ep_size": 2}, "data-parallel experts"),
]


@pytest.mark.parametrize(("options", "parallel", "reason"), REFUSED, ids=str)
def test_what_is_not_supported_is_reported(
    options: dict[str, Any],
    parallel: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error with `moe: on`; with `auto` a log line, and vLLM runs them, which it cannot on a
    CPU."""
    with ranks_of(monkeypatch, **parallel):
        with pytest.raises(ValueError, match=f"halfbyte: moe on: .*{reason}.*use moe auto or off"):
            make_layer(**options)
        with (
            caplog.at_level(logging.WARNING, "halfbyte"),
            pytest.raises(NotImplementedError, match="No NvFp4 MoE backend supports"),
        ):
            make_layer({}, **options)
    assert [r for r in caplog.records if "left to vLLM: halfbyte does not support" in r.message]
    assert reason in caplog.text


def test_vllm_s_own_methods_stay() -> None:
    """With `off`, and without halfbyte's attention; vLLM has no kernel for CPUs."""
    for options in ({"additional_config": {"halfbyte": {"moe": "off"}}}, {"backend": None}):
        with pytest.raises(NotImplementedError, match="No NvFp4 MoE backend supports"):
            make_layer(**{"additional_config": {}, **options})


def test_moe_backend_overrules(caplog: pytest.LogCaptureFixture) -> None:
    _warn_overruled.cache_clear()
    with pytest.raises(ValueError, match="'MARLIN' does not support the deployment"):
        make_layer(moe_backend="marlin")
    assert "4-bit experts run on marlin, as --moe-backend says" in caplog.text


def test_activations_are_not_quantized(caplog: pytest.LogCaptureFixture) -> None:
    """A W4A4 checkpoint is logged; a requested activation format is an error."""
    _log_choice.cache_clear()
    config = ModelOptNvFp4Config("NVFP4", True, None, [], 16)
    assert isinstance(make_layer(quant_config=config).quant_method, HalfbyteMoeMethod)
    assert "NVFP4 experts run on halfbyte's kernels as W4A16" in caplog.text
    config.moe_activation_override = "nvfp4_per_token"
    with pytest.raises(ValueError, match="moe on: an activation format in --quantization-config"):
        make_layer(quant_config=config)


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        ((2, "", ""), None, r"expert 2: gate_proj's codes are missing \(and 1 more\)"),
        ((2, "w3", "weight"), None, "expert 2: up_proj's codes are missing$"),
        ((2, "w2", "weight_scale"), None, "expert 2: down_proj's block scales are missing"),
        ((4, "w1", "weight_scale_2"), None, "expert 4: gate_proj's global scale is missing"),
        (None, ("w13_weight_scale", 0x7F), "expert 1: gate_proj's block scales .* NaN"),
        (None, ("w2_weight_scale_2", 0.0), "expert 1: down_proj's global scale .* positive"),
    ],
)
def test_missing_weights_and_nan_are_refused(without: Any, changed: Any, message: str) -> None:
    layer = make_layer()

    def is_loaded(expert: int, shard: str, suffix: str) -> bool:
        if without is None or expert != without[0]:
            return True
        return without[1] not in ("", shard) or without[2] not in ("", suffix)

    def change() -> None:
        if changed is not None:
            name, value = changed
            tensor = getattr(layer, name).data
            rows = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            rows.view(E, -1)[1, 0] = value

    with pytest.raises(ValueError, match=f"^model.layers.0.mlp.experts.*: {message}"):
        load(layer, random_experts(E, H, I), is_loaded, change)


def test_missing_weights_are_named_by_the_model_s_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_of(monkeypatch, use_ep=True, ep_size=2, ep_rank=1):
        layer = make_layer()
    with pytest.raises(ValueError, match="expert 4: gate_proj's codes are missing"):
        load(layer, random_experts(E, H, I), lambda expert, *_: expert != 4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gpt_oss_s_ranks_add_up(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 blocks, 2 ranks have 2 and 1, and 4 ranks 1 each but the last: the rest is padding."""
    experts = gpt_oss_experts()
    x, (ids, weights) = random_hidden(9, H), random_routing(9, 2, E)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        with ranks_of(monkeypatch, tp_size=ranks, tp_rank=rank):
            layer = make_gpt_oss()
        load_gpt_oss(layer, experts, rank)
        total += run(layer, x, ids.int(), weights)
    expected = moe_experts(x, experts, ids, weights, backend="reference")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("w13_bias", None, r"expert 0: gate_up_proj's biases are missing \(and 4 more\)$"),
        ("w2_bias", None, r"expert 0: down_proj's biases are missing \(and 4 more\)$"),
        ("w13_bias", torch.nan, "expert 3: gate_up_proj's biases are NaN or infinite$"),
        ("w2_bias", torch.inf, "expert 3: down_proj's biases are NaN or infinite$"),
        ("w2_weight_scale", None, "w2_weight_scale of all experts is missing$"),
        ("w13_weight_scale", 0xFF, "expert 3: gate_up_proj's block scales are NaN$"),
        ("w2_weight_scale", 0xFF, "expert 3: down_proj's block scales are NaN$"),
    ],
)
def test_gpt_oss_s_missing_tensors_are_refused(name: str, value: Any, message: str) -> None:
    experts, bad = gpt_oss_experts(), None
    if value is not None:
        matrices = experts.gate_up if name.startswith("w13") else experts.down
        found = matrices.bias if name.endswith("bias") else matrices.scales
        assert found is not None
        bad = found.clone()
        bad[3, 5] = value
    with pytest.raises(ValueError, match=f"^model.layers.0.mlp.experts.*: {message}"):
        load_gpt_oss(make_gpt_oss(), experts, 0, **{name: bad})


def test_gpt_oss_s_biases_may_be_zero() -> None:
    experts = gpt_oss_experts()
    zero = torch.zeros(E, 2 * I, dtype=torch.bfloat16)
    layer = make_gpt_oss()
    load_gpt_oss(layer, experts, 0, w13_bias=zero)
    experts = replace(experts, gate_up=replace(experts.gate_up, bias=zero))
    x, (ids, weights) = random_hidden(9, H), random_routing(9, 2, E)
    expected = moe_experts(x, experts, ids, weights, backend="reference")
    torch.testing.assert_close(run(layer, x, ids, weights), expected, rtol=1e-5, atol=1e-5)


def load_any(layer: Any, experts: PackedExperts) -> None:
    """Load a layer of either format."""
    if experts.gate_up.format == "mxfp4":
        load_gpt_oss(layer, experts, 0)
    else:
        load(layer, experts)


def make_in_bfloat16(name: str, device: str) -> tuple[Any, PackedExperts]:
    """A layer and what its checkpoint has."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
    if name == "gpt-oss":
        return make_gpt_oss(**options), gpt_oss_experts()
    return make_layer(**options), random_experts(E, H, I, dtype=torch.bfloat16)


def assert_within_tier_2(layer: Any, experts: PackedExperts, m: int, device: str) -> None:
    """Expert 4 gets no token; ids of other ranks are -1."""
    x, (ids, weights) = random_hidden(m, H, torch.bfloat16), random_routing(m, 2, E - 1)
    ids[m // 2 :: 3, 1:] = -1
    found = run(layer, x.to(device), ids.int().to(device), weights.to(device))
    assert_close_enough(found.cpu(), x, experts, ids, weights)


class OnHost(AsLoadedKernel):
    """The kernel `cuda` for few tokens per expert, in the emulation of a GPU."""

    name = "cuda"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, ""

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        return True, ""

    def apply(self, tensors: Any, hidden: torch.Tensor, ids: Any, weights: Any) -> torch.Tensor:
        experts = from_tensors(tensors, self.config.activation)
        return run_on_host(hidden, experts, ids, weights)


@cuda_on_host.needs_compiler
@pytest.mark.parametrize("name", ["nvfp4", "gpt-oss"])
def test_cuda_on_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's loader leaves is what the CUDA kernel reads."""
    monkeypatch.setattr(moe_method, "init_moe_kernel", OnHost)
    layer, experts = make_in_bfloat16(name, "cpu")
    load_any(layer, experts)
    assert isinstance(layer.quant_method.kernel, OnHost)
    for m in (0, 1, 9):
        assert_within_tier_2(layer, experts, m, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "gpt-oss"])
def test_cuda(name: str) -> None:
    """For few tokens per expert the streaming kernel, for 1,600 pairs `gemm_sm90` or Triton."""
    layer, experts = make_in_bfloat16(name, "cuda")
    load_any(layer, experts)
    kernel = layer.quant_method.kernel
    assert isinstance(kernel, CudaKernel)
    assert kernel.config.weight_format == experts.gate_up.format
    for m in (0, 1, 9, 800):
        assert_within_tier_2(layer, experts, m, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 1])
def test_cuda_of_a_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallel: other ranks' experts add nothing."""
    experts = random_experts(E, H, I, dtype=torch.bfloat16)
    with ranks_of(monkeypatch, use_ep=True, ep_size=2, ep_rank=rank):
        layer = make_layer(params_dtype=torch.bfloat16, device="cuda")
    load(layer, experts)
    assert isinstance(layer.quant_method.kernel, CudaKernel)
    x, (ids, weights) = random_hidden(9, H, torch.bfloat16), random_routing(9, 2, E)
    own = (ids < 3) if rank == 0 else (ids >= 3)
    found = run(layer, x.cuda(), ids.int().cuda(), weights.cuda())
    assert_close_enough(found.cpu(), x, experts, torch.where(own, ids, -1), weights)
