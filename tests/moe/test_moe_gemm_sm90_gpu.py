"""The CUDA kernels for many tokens per expert on an SM90."""

from typing import Any

import pytest
import torch

from halfbyte.moe import GPT_OSS, SWIGLU, PackedExperts
from halfbyte.moe.cuda.gemm_sm90.launcher import run
from halfbyte.moe.cuda.gemm_sm90.plan import TOKENS
from moe.cases import (
    LIMITED,
    assert_close_enough,
    on_gpu,
    packed_matrices,
    random_experts,
    random_hidden,
    random_routing,
)

pytestmark = pytest.mark.gpu


def needs_sm90() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is SM90's")


def product(
    hidden: torch.Tensor,
    experts: PackedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: int | None = None,
) -> torch.Tensor:
    matrices = packed_matrices(experts, hidden.dtype)
    return run(hidden, *matrices, experts.activation, ids, weights, tokens)


@pytest.mark.parametrize(
    ("weight_format", "activation", "bias", "dtype"),
    [
        ("nvfp4", SWIGLU, False, torch.bfloat16),
        ("nvfp4", LIMITED, True, torch.float16),
        ("mxfp4", LIMITED, True, torch.bfloat16),
        ("mxfp4", GPT_OSS, True, torch.bfloat16),
    ],
    ids=["swiglu", "limited-fp16", "mxfp4-limited", "gpt-oss"],
)
@pytest.mark.parametrize(("h", "i"), [(2048, 768), (608, 96), (96, 544), (2880, 2880)])
def test_error(
    weight_format: Any, activation: Any, bias: bool, dtype: torch.dtype, h: int, i: int
) -> None:
    needs_sm90()
    options: Any = {"weight_format": weight_format, "activation": activation, "bias": bias}
    experts = on_gpu(random_experts(8, h, i, dtype=dtype, **options))
    for m, top_k in ((0, 2), (1, 3), (20, 2), (200, 4)):
        ids, weights = (t.cuda() for t in random_routing(m, top_k, 8))
        ids[m // 2 :: 7, :1] = -1
        hidden = random_hidden(m, h, dtype).cuda()
        out = product(hidden, experts, ids, weights)
        assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize("tokens", TOKENS)
def test_tiles(tokens: int) -> None:
    """All tiles give the same bits, of one expert with all tokens and of many."""
    needs_sm90()
    experts = on_gpu(random_experts(8, 2048, 768, dtype=torch.bfloat16))
    hidden = random_hidden(300, 2048, torch.bfloat16).cuda()
    for ids, weights in (random_routing(300, 2, 8), (torch.full((300, 1), 5), torch.ones(300, 1))):
        ids, weights = ids.cuda(), weights.cuda()
        out = product(hidden, experts, ids, weights, tokens)
        assert_close_enough(out, hidden, experts, ids, weights)
        assert torch.equal(out, product(hidden, experts, ids, weights, 64))


@pytest.mark.parametrize("m", [700, 2500])
def test_tiles_of_16_tokens_for_many_pairs(m: int) -> None:
    """More pairs than the kernel that lists them has threads."""
    needs_sm90()
    experts = on_gpu(random_experts(8, 608, 96, dtype=torch.bfloat16))
    hidden = random_hidden(m, 608, torch.bfloat16).cuda()
    ids, weights = (t.cuda() for t in random_routing(m, 3, 8))
    out = product(hidden, experts, ids, weights, 16)
    assert_close_enough(out, hidden, experts, ids, weights)


def test_bits_do_not_depend_on_the_batch() -> None:
    needs_sm90()
    experts = on_gpu(random_experts(8, 2048, 768, dtype=torch.bfloat16))
    hidden = random_hidden(900, 2048, torch.bfloat16).cuda()
    ids, weights = (t.cuda() for t in random_routing(900, 4, 8))
    whole = product(hidden, experts, ids, weights)
    for rows in (slice(0, 1), slice(100, 133), slice(300, 900)):
        assert torch.equal(product(hidden[rows], experts, ids[rows], weights[rows]), whole[rows])
