"""The oracle of MoE layers, against a dense computation in float64."""

import pytest
import torch

from halfbyte.moe import GPT_OSS, SWIGLU, GatedActivation, moe_experts
from halfbyte.moe.experts import WeightFormat
from halfbyte.moe.reference import moe_reference
from moe.cases import (
    LIMITED,
    assert_close_enough,
    dense,
    random_experts,
    random_hidden,
    random_routing,
)

ACTIVATIONS = [SWIGLU, LIMITED]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["swiglu", "gpt_oss"])
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_float64_is_exact(
    weight_format: WeightFormat, activation: GatedActivation, bias: bool
) -> None:
    experts = random_experts(weight_format=weight_format, activation=activation, bias=bias)
    ids, weights = random_routing(9, 2, 4)
    hidden = random_hidden(9, 64).double()
    out = moe_reference(hidden, experts, ids, weights)
    expected = dense(hidden, experts, ids, weights)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error(dtype: torch.dtype, batch_invariant: bool) -> None:
    experts = random_experts(5, 80, 48, activation=LIMITED, bias=True, dtype=dtype)
    ids, weights = random_routing(20, 3, 5)
    hidden = random_hidden(20, 80, dtype)
    options = {"backend": "reference", "batch_invariant": batch_invariant}
    out = moe_experts(hidden, experts, ids.int(), weights.to(dtype), **options)  # type: ignore[arg-type]
    assert_close_enough(out, hidden, experts, ids, weights.to(dtype))


def test_no_tokens() -> None:
    ids, weights = random_routing(0, 2, 4)
    out = moe_experts(random_hidden(0, 64), random_experts(), ids, weights, backend="reference")
    assert out.shape == (0, 64)


def test_one_expert_takes_all() -> None:
    experts, hidden = random_experts(), random_hidden(7, 64)
    ids, weights = torch.full((7, 1), 3), torch.full((7, 1), 0.7)
    out = moe_experts(hidden, experts, ids, weights, backend="reference")
    assert_close_enough(out, hidden, experts, ids, weights)


def test_an_expert_twice_counts_twice() -> None:
    experts, hidden = random_experts(), random_hidden(3, 64)
    ids, weights = torch.full((3, 2), 1), torch.full((3, 2), 0.5)
    out = moe_reference(hidden.double(), experts, ids, weights)
    once = moe_reference(hidden.double(), experts, ids[:, :1], 2 * weights[:, :1])
    torch.testing.assert_close(out, once)


def test_weights_are_not_normalized() -> None:
    experts, hidden = random_experts(), random_hidden(3, 64).double()
    ids, weights = random_routing(3, 2, 4)
    out = moe_reference(hidden, experts, ids, 4 * weights)
    torch.testing.assert_close(out, 4 * moe_reference(hidden, experts, ids, weights))


@pytest.mark.parametrize("absent", [-1, 4, 99])
def test_ids_of_no_expert_add_nothing(absent: int) -> None:
    experts, hidden = random_experts(), random_hidden(3, 64).double()
    ids, weights = random_routing(3, 2, 4)
    ids[1], ids[2, 0] = absent, absent
    out = moe_reference(hidden, experts, ids, weights)
    assert not out[1].any()
    torch.testing.assert_close(out, dense(hidden, experts, ids, weights))
    weights[1], weights[2, 0] = torch.nan, torch.inf
    assert torch.equal(moe_reference(hidden, experts, ids, weights), out)


def test_only_hit_experts_are_read() -> None:
    experts, hidden = random_experts(), random_hidden(3, 64)
    ids, weights = torch.tensor([[0, 2]]).repeat(3, 1), torch.ones(3, 2)
    expected = moe_experts(hidden, experts, ids, weights, backend="reference")
    for matrices in (experts.gate_up, experts.down):
        matrices.scales.view(torch.uint8)[[1, 3]] = 0x7F  # NaN
    out = moe_experts(hidden, experts, ids, weights, backend="reference")
    assert torch.equal(out, expected)


def test_bits_do_not_depend_on_the_batch() -> None:
    experts, hidden = random_experts(3, 80, 48), random_hidden(40, 80)
    ids, weights = random_routing(40, 2, 3)
    whole = moe_reference(hidden, experts, ids, weights, batch_invariant=True)
    for rows in (slice(0, 1), slice(5, 6), slice(7, 29), slice(39, 40)):
        part = moe_reference(hidden[rows], experts, ids[rows], weights[rows], batch_invariant=True)
        assert torch.equal(part, whole[rows])


def test_gpt_oss_activation_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    theirs = modeling.GptOssExperts.__new__(modeling.GptOssExperts)
    torch.nn.Module.__init__(theirs)
    theirs.alpha, theirs.limit = 1.702, 7.0
    gate_up = 6 * random_hidden(50, 64)
    assert float(gate_up.abs().max()) > GPT_OSS.limit  # type: ignore[operator]
    torch.testing.assert_close(GPT_OSS(gate_up), theirs._apply_gate(gate_up))
