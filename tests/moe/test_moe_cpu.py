"""The C++ backend of MoE layers."""

from dataclasses import replace

import pytest
import torch

from halfbyte.kernels.cpu.library import library
from halfbyte.moe import (
    MOE_BACKENDS,
    SWIGLU,
    GatedActivation,
    MoeConfig,
    init_moe_kernel,
    moe_experts,
    select_moe_kernel,
)
from halfbyte.moe.cpu import CpuKernel
from halfbyte.moe.experts import WeightFormat
from halfbyte.moe.mxfp4_blocks import as_nvfp4
from halfbyte.numerics import block_fp4, nvfp4
from moe.cases import (
    LIMITED,
    assert_close_enough,
    random_experts,
    random_hidden,
    random_routing,
)

needs_library = pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weight_format", "activation", "bias"),
    [("nvfp4", SWIGLU, False), ("nvfp4", LIMITED, True), ("mxfp4", LIMITED, True)],
)
def test_error(
    level: str,
    weight_format: WeightFormat,
    activation: GatedActivation,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    experts = random_experts(
        5, 96, 160, weight_format=weight_format, activation=activation, bias=bias, dtype=dtype
    )
    for m, top_k in ((0, 2), (1, 3), (7, 1), (60, 2)):
        ids, weights = random_routing(m, top_k, 5)
        hidden = random_hidden(m, 96, dtype)
        out = moe_experts(hidden, experts, ids, weights, backend="cpu")
        assert_close_enough(out, hidden, experts, ids, weights)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    experts = random_experts(3, 80, 48, activation=LIMITED, bias=True, dtype=dtype)
    ids, weights = random_routing(90, 2, 3)
    hidden = random_hidden(90, 80, dtype)
    whole = moe_experts(hidden, experts, ids, weights, backend="cpu", batch_invariant=True)
    for rows in (slice(0, 1), slice(31, 33), slice(7, 77), slice(89, 90)):
        part = moe_experts(
            hidden[rows],
            experts,
            ids[rows],
            weights[rows],
            backend="cpu",
            batch_invariant=True,
        )
        assert torch.equal(part, whole[rows])


@needs_library
def test_only_hit_experts_are_read() -> None:
    experts, hidden = random_experts(), random_hidden(3, 64)
    ids, weights = torch.tensor([[0, 2]]).repeat(3, 1), torch.ones(3, 2)
    ids[1, 1] = -1
    expected = moe_experts(hidden, experts, ids, weights, backend="cpu")
    assert_close_enough(expected, hidden, experts, ids, weights)
    for matrices in (experts.gate_up, experts.down):
        matrices.scales.view(torch.uint8)[[1, 3]] = 0x7F  # NaN
    weights[1, 1] = torch.nan
    assert torch.equal(moe_experts(hidden, experts, ids, weights, backend="cpu"), expected)


@needs_library
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_weights_come_back_as_loaded(weight_format: WeightFormat) -> None:
    experts = random_experts(3, 96, 32, weight_format=weight_format, activation=LIMITED, bias=True)
    experts.gate_up.weight[1, 2] = 0  # a row of zeros
    kernel = init_moe_kernel(MoeConfig.of(experts, torch.float32), "cpu")
    restored = kernel.restore(kernel.prepare(experts))
    assert restored.activation == experts.activation
    for name in ("gate_up", "down"):
        for part in ("weight", "scales", "global_scale", "bias"):
            found = getattr(getattr(restored, name), part)
            wanted = getattr(getattr(experts, name), part)
            if wanted is None:
                assert found is None
            else:
                assert found.dtype == wanted.dtype
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_mxfp4_becomes_nvfp4_without_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 5, 96, generator=generator)
    weight[..., 32:64] *= 2.0**-10
    weight[1] *= 2.0**40
    weight[1, 3, 32:64] = 0
    weight[0, 0] = 0
    data, scales = block_fp4.quantize_mxfp4(weight)
    blocks, rows = as_nvfp4(data, scales)
    expected = block_fp4.dequantize_mxfp4(data, scales)
    assert torch.equal(nvfp4.dequantize(data, blocks, rows[..., None]), expected)


def test_exponents_of_17_are_the_limit() -> None:
    weight = torch.ones(1, 2, 96)
    weight[0, 1, 32:] *= 2.0**-17
    data, scales = block_fp4.quantize_mxfp4(weight)
    blocks, rows = as_nvfp4(data, scales)
    expected = block_fp4.dequantize_mxfp4(data, scales)
    assert torch.equal(nvfp4.dequantize(data, blocks, rows[..., None]), expected)
    scales[0, 1, 2] -= 1
    with pytest.raises(ValueError, match=r"down: expert 0, row 1: expected MXFP4 exponents within"):
        as_nvfp4(data, scales, "down")


@needs_library
def test_cpu_is_chosen_on_a_cpu() -> None:
    config = MoeConfig(4, 64, 32, torch.bfloat16)
    assert select_moe_kernel(config) is CpuKernel
    on_gpu = replace(config, device_type="cuda", compute_capability=90)
    reasons = {verdict.name: verdict.reason for verdict in MOE_BACKENDS.explain(on_gpu, 90)}
    assert reasons["cpu"] == "tensors are on cuda, not on the CPU"


@needs_library
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_operator_is_one_node_of_a_graph(backend: str) -> None:
    experts, hidden = random_experts(bias=True), random_hidden(5, 64)
    ids, weights = random_routing(5, 2, 4)
    kernel = init_moe_kernel(MoeConfig.of(experts, torch.float32), backend)
    tensors = kernel.prepare(experts)

    def run(x: torch.Tensor) -> torch.Tensor:
        return kernel.apply(tensors, x * 2, ids, weights) + 1

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), run(hidden))
