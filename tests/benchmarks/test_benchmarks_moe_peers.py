"""Peers of the benchmark of experts, as far as they can be tested without them."""

from dataclasses import replace

import pytest
import torch

from benchmarks.peers.moe import MOE_PEERS, MoePeer, one_scale_per_expert
from benchmarks.peers.moe_padding import padded_experts, padded_tokens
from halfbyte.bench import MOE_SHAPES, MoeShape
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import is_installed
from halfbyte.moe import GatedActivation, MoeConfig
from halfbyte.moe.reference import moe_reference

CPU = torch.device("cpu")
NVFP4, MXFP4 = (
    MOE_SHAPES[name].config(torch.bfloat16, torch.device("meta"))
    for name in ("qwen3-30b-a3b", "gpt-oss-20b")
)


@pytest.mark.parametrize("name", MOE_PEERS.names())
def test_a_peer_is_registered_by_its_name_and_needs_a_gpu(name: str) -> None:
    peer = MOE_PEERS.get(name)
    assert issubclass(peer, MoePeer)
    assert peer.name == name
    assert peer.is_supported(0) == (False, "needs an NVIDIA GPU")
    assert peer.is_supported(75)[1].startswith("needs compute capability")
    assert peer.is_supported(90)[0]


@pytest.mark.skipif(is_installed("vllm"), reason="vLLM is installed")
def test_what_is_not_installed_is_named() -> None:
    for name in ("vllm_marlin", "vllm_bf16", "triton_kernels"):
        assert MOE_PEERS.get(name).missing() == "needs vllm (pip install vllm)"
    reason = MOE_PEERS.get("humming").missing()
    assert reason is not None
    assert reason.startswith(("needs humming-kernels", "needs vllm"))


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("vllm_marlin", NVFP4, None),
        ("vllm_marlin", MXFP4, None),
        ("vllm_marlin", replace(NVFP4, hidden_size=96), "H in multiples of 64, not 96"),
        ("vllm_marlin", replace(NVFP4, has_bias=True), "without biases"),
        (
            "vllm_marlin",
            replace(MXFP4, activation=GatedActivation()),
            "MXFP4 with gate and up interleaved",
        ),
        ("vllm_bf16", NVFP4, None),
        ("vllm_bf16", MXFP4, None),
        ("vllm_bf16", replace(NVFP4, dtype=torch.float16), "bfloat16 only, not torch.float16"),
        ("humming", NVFP4, None),
        ("humming", MXFP4, None),
        ("humming", replace(NVFP4, activation=GatedActivation(alpha=2.0)), "has SwiGLU and"),
        ("triton_kernels", MXFP4, None),
        ("triton_kernels", NVFP4, "takes MXFP4, not nvfp4"),
        ("triton_kernels", replace(MXFP4, intermediate_size=96), "I in multiples of 64, not 96"),
    ],
)
def test_a_peer_says_what_it_cannot_run(name: str, config: MoeConfig, reason: str | None) -> None:
    usable, why = MOE_PEERS.get(name).can_implement(config)
    assert usable == (reason is None)
    assert reason is None or reason in why


def test_padded_experts_have_the_same_results() -> None:
    experts = RandomExperts(MoeShape(3, 2, 96, 64, "mxfp4"), CPU, torch.float32)
    padded = padded_experts(experts.packed, 128, 160)
    assert (padded.num_experts, padded.hidden_size, padded.intermediate_size) == (3, 128, 160)
    x, (ids, weights) = experts.x(5), experts.routings(5)[0]
    expected = moe_reference(x.double(), experts.packed, ids, weights)
    found = moe_reference(padded_tokens(x, 128).double(), padded, ids, weights)
    torch.testing.assert_close(found[:, :96], expected, rtol=1e-12, atol=0)
    assert not found[:, 96:].any()
    same = padded_experts(experts.packed, 96, 64)
    assert torch.equal(same.down.weight, experts.packed.down.weight)


def test_padding_is_for_interleaved_mxfp4() -> None:
    experts = RandomExperts(MoeShape(3, 2, 64, 32), CPU, torch.float32)
    with pytest.raises(ValueError, match="expected MXFP4 with gate and up interleaved"):
        padded_experts(experts.packed, 128, 64)


def test_peers_have_one_global_scale_per_expert() -> None:
    scales = torch.tensor([[0.5, 0.5], [2.0, 2.0]])
    assert one_scale_per_expert(scales).tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="expected equal scales of gate and up"):
        one_scale_per_expert(torch.tensor([[0.5, 0.25]]))
