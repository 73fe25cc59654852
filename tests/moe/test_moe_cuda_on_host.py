"""The CUDA kernels for few tokens per expert, run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe import PackedExperts
from halfbyte.moe.cuda import launcher, sums
from halfbyte.moe.cuda.plan import StreamingPlan, Work, make_plan
from moe.cases import assert_close_enough, random_hidden, random_routing
from moe.on_host import BF16, KINDS, Kind, experts_of, moved, packed_on_host, spoil
from slow import slow

pytestmark = cuda_on_host.needs_compiler

SMALL_GPU = Gpu(90, 99 * 1024, 3, 0)


@contextmanager
def on_host() -> Iterator[None]:
    """Let the launcher's kernels run on the CPU; memory that it allocates begins as NaN."""
    launcher._product_kernel.cache_clear()
    launcher._plan.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(SMALL_GPU.compute_capability),
        patch.object(launcher, "gpu_of", lambda device: SMALL_GPU),
        patch.object(launcher, "allocate", cuda_on_host.allocate),
        patch.object(sums, "allocate", cuda_on_host.allocate),
    ):
        yield
    launcher._product_kernel.cache_clear()
    launcher._plan.cache_clear()


def run(
    hidden: torch.Tensor, experts: PackedExperts, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the launcher; memory after all tensors is unmapped."""
    matrices = packed_on_host(experts, hidden.dtype)
    with on_host():
        return launcher.run(
            moved(hidden), *matrices, experts.activation, moved(ids), moved(weights)
        )


HIDDEN, INTERMEDIATE = 672, 96
"""HIDDEN ends within a chunk, the 11th: its last part has one. Three warps can share it."""


@pytest.mark.parametrize(
    "kind",
    [KINDS["swiglu"], slow(KINDS["limited-fp16"]), KINDS["mxfp4-limited"]],
    ids=KINDS,
)
def test_error(kind: Kind) -> None:
    experts = experts_of(kind, 5, HIDDEN, INTERMEDIATE)
    for m, top_k in ((1, 3), (5, 2), (9, 1)):
        ids, weights = random_routing(m, top_k, 5)
        hidden = random_hidden(m, HIDDEN, kind[3])
        out = run(hidden, experts, ids, weights)
        assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize(
    ("kind", "split", "parts"),
    [
        ("swiglu", 1, 4),
        slow("swiglu", 2, 3),
        slow("swiglu", 1, 8),
        slow("limited-fp16", 3, 1),
        ("mxfp4-limited", 2, 3),
        slow("mxfp4-limited", 1, 6),
    ],
)
def test_ways_to_share_k(kind: str, split: int, parts: int) -> None:
    """Warps that share a tile's k or not; items of several parts, of which the last has fewer."""

    def plan_of(work: Work, m: int, top_k: int, gpu: Gpu) -> StreamingPlan:
        plan = make_plan(work, m, top_k, gpu)
        fits = work.items(parts) % split == 0
        return plan._replace(split=split if fits else 1, groups=2, stages=2, ctas=1, parts=parts)

    experts = experts_of(KINDS[kind], 5, HIDDEN, INTERMEDIATE)
    ids, weights = random_routing(9, 2, 5)
    hidden = random_hidden(9, HIDDEN, KINDS[kind][3])
    with patch.object(launcher, "make_plan", plan_of):
        out = run(hidden, experts, ids, weights)
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize(("hidden_size", "split"), [(672, 1), (672, 3), (640, 1)])
def test_one_token_times_blocks_of_k(hidden_size: int, split: int) -> None:
    """MXFP4 (`single.cuh`): several items per tile, of which the last may have one part; large
    activations, and a scale that is NaN."""

    def plan_of(work: Work, m: int, top_k: int, gpu: Gpu) -> StreamingPlan:
        plan = make_plan(work, m, top_k, gpu)
        own = split if work.items(2) % split == 0 else 1
        plan = plan._replace(split=own, groups=2, stages=2, ctas=1, parts=2)
        assert plan.is_single(work)
        return plan

    experts = experts_of(KINDS["mxfp4-limited"], 5, hidden_size, INTERMEDIATE)
    ids, weights = random_routing(1, 3, 5)
    with patch.object(launcher, "make_plan", plan_of):
        for factor in (1.0, 2.0**40):
            hidden = random_hidden(1, hidden_size, BF16) * factor
            out = run(hidden, experts, ids, weights)
            assert_close_enough(out, hidden, experts, ids, weights)
        experts.down.scales[ids[0, 1], 2, 0] = 255
        assert run(hidden, experts, ids, weights).isnan().nonzero().tolist() == [[0, 2]]


def test_experts_with_more_tokens_than_a_pass() -> None:
    """Two tiles of tokens, and several passes; ids of 32 bits, weights of 16."""
    experts, hidden = experts_of(KINDS["swiglu"], 2, 64, 32), random_hidden(21, 64, BF16)
    ids, weights = random_routing(21, 1, 2)
    out = run(hidden, experts, ids.int(), weights.to(BF16))
    assert_close_enough(out, hidden, experts, ids, weights)
    ids.fill_(1)
    out = run(hidden, experts, ids, weights)
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize("top_k", [3, slow(1)])
def test_few_pairs_need_no_lists(top_k: int) -> None:
    """The same bits as with lists in shared memory. Of 4 columns, an expert with 6 tokens has two
    entries."""

    def plan_of(few: bool, work: Work, m: int, top_k: int, gpu: Gpu) -> StreamingPlan:
        return make_plan(work, m, top_k, gpu)._replace(columns=4, few=few)

    experts, hidden = experts_of(KINDS["swiglu"], 5, 96, 64), random_hidden(10, 96, BF16)
    ids, weights = random_routing(10, top_k, 5)
    ids[:6, 0], ids[7, 0] = 3, -1
    outs = []
    for few in (False, True):
        with patch.object(launcher, "make_plan", partial(plan_of, few)):
            outs.append(run(hidden, experts, ids, weights))
    assert torch.equal(*outs)
    assert_close_enough(outs[1], hidden, experts, ids, weights)


@pytest.mark.parametrize(
    ("kind", "m"),
    [("swiglu", 4), ("mxfp4-limited", 1), slow("mxfp4-limited", 4), slow("swiglu", 3)],
)
def test_tokens_that_stay_in_shared_memory(kind: str, m: int) -> None:
    """The same bits as with tokens that are loaded for each expert; an expert that a token has
    twice, and pairs without one."""

    def plan_of(resident: bool, work: Work, m: int, top_k: int, gpu: Gpu) -> StreamingPlan:
        plan = make_plan(work, m, top_k, gpu)
        assert plan.few
        assert plan.resident
        return plan._replace(resident=resident)

    experts, hidden = (
        experts_of(KINDS[kind], 5, HIDDEN, INTERMEDIATE),
        random_hidden(m, HIDDEN, BF16),
    )
    ids, weights = random_routing(m, 3, 5)
    ids[-1, 1] = ids[-1, 2]
    ids[0, 0] = -1
    outs = []
    for resident in (False, True):
        with patch.object(launcher, "make_plan", partial(plan_of, resident)):
            outs.append(run(hidden, experts, ids, weights))
    assert torch.equal(*outs)
    assert_close_enough(outs[1], hidden, experts, ids, weights)


def test_no_tokens() -> None:
    experts = experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE)
    out = run(random_hidden(0, HIDDEN, BF16), experts, *random_routing(0, 2, 5))
    assert out.shape == (0, HIDDEN)


@pytest.mark.parametrize("absent", [-1, 5, 2**40])
def test_ids_of_no_expert(absent: int) -> None:
    experts, hidden = (
        experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(5, HIDDEN, BF16),
    )
    ids, weights = random_routing(5, 2, 5)
    ids[1], ids[2, 0] = absent, absent
    out = run(hidden, experts, ids, weights)
    assert not out[1].any()
    assert_close_enough(out, hidden, experts, ids, weights)
    assert not run(hidden, experts, torch.full_like(ids, absent), weights).any()


def test_bits_do_not_depend_on_the_batch() -> None:
    experts, hidden = (
        experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(9, HIDDEN, BF16),
    )
    ids, weights = random_routing(9, 2, 5)
    whole = run(hidden, experts, ids, weights)
    for rows in (slice(0, 1), slice(4, 9)):
        assert torch.equal(run(hidden[rows], experts, ids[rows], weights[rows]), whole[rows])


def test_experts_that_are_not_hit_are_not_read() -> None:
    experts, hidden = (
        experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(5, HIDDEN, BF16),
    )
    ids, weights = torch.tensor([[0, 2]]).repeat(5, 1), torch.ones(5, 2)
    expected = run(hidden, experts, ids, weights)
    spoil(experts, [1, 3, 4])
    assert torch.equal(run(hidden, experts, ids, weights), expected)


def test_subnormal_block_scales() -> None:
    experts, hidden = (
        experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(5, HIDDEN, BF16),
    )
    scales = experts.down.scales.view(torch.uint8)
    scales.copy_(torch.randint(0, 8, scales.shape, generator=torch.Generator().manual_seed(0)))
    ids, weights = random_routing(5, 2, 5)
    assert_close_enough(run(hidden, experts, ids, weights), hidden, experts, ids, weights)


@pytest.mark.parametrize("exponent", [20, 139, 140, 170])
def test_block_scales_of_any_size(exponent: int) -> None:
    """MXFP4's scales, also around 2^12, where the bfloat16 operand would overflow."""
    experts = experts_of(KINDS["mxfp4-limited"], 5, HIDDEN, INTERMEDIATE)
    experts.down.scales[:, ::3, 1:] = exponent
    for m in (5, 1):
        hidden = random_hidden(m, HIDDEN, BF16)
        ids, weights = random_routing(m, 2, 5)
        assert_close_enough(run(hidden, experts, ids, weights), hidden, experts, ids, weights)


def test_experts_of_one_cta() -> None:
    """More experts than CTAs: a CTA has several, and one from which another CTA has tiles."""
    experts, hidden = experts_of(KINDS["swiglu"], 37, 64, 96), random_hidden(21, 64, BF16)
    ids, weights = random_routing(21, 5, 37)
    out = run(hidden, experts, ids, weights)
    assert_close_enough(out, hidden, experts, ids, weights)
