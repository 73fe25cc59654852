"""The CUDA kernels for one token, run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from halfbyte.kernels.runtime import nvrtc
from halfbyte.kernels.runtime.devices import Memory
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe import PackedExperts
from halfbyte.moe.cuda import token_launcher
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.cuda.token_plan import TokenPlan
from moe.cases import assert_close_enough, random_hidden, random_routing
from moe.on_host import BF16, KINDS, Kind, experts_of, moved, packed_on_host, spoil
from slow import slow

pytestmark = cuda_on_host.needs_compiler

SMALL_GPU = Gpu(90, 99 * 1024, 3, 0)
HIDDEN, INTERMEDIATE = 672, 96
"""HIDDEN ends within a chunk, the 11th: its last part has one. Three warps can share it."""


@contextmanager
def on_host(x: torch.Tensor) -> Iterator[None]:
    """Let the launcher's kernels run on the CPU, where each starts before the one in front has
    written: `x`, or the first product. Memory that is allocated begins as NaN."""
    written = [x]

    def allocate(memory: Memory, device: object) -> torch.Tensor:
        written.append(cuda_on_host.allocate(memory, device))
        return written[-1]

    launched: list[object] = []

    def launch(
        kernel: Any, grid: int, threads: int, arguments: Any, *, overlap: bool, ctas_per_sm: int = 0
    ) -> None:
        assert overlap
        late = written[len(launched)]
        launched.append(kernel)
        before = torch.full_like(late, torch.nan)
        function, shared_bytes = kernel.function, kernel.shared_bytes
        cuda_on_host.launch(
            *(function, grid, threads, *arguments), shared_bytes=shared_bytes, late=(late, before)
        )

    token_launcher._kernel.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(SMALL_GPU.compute_capability),
        patch.object(nvrtc, "launch", launch),
        patch.object(token_launcher, "gpu_of", lambda device: SMALL_GPU),
        patch.object(token_launcher, "allocate", allocate),
    ):
        yield
    token_launcher._kernel.cache_clear()


def run(
    hidden: torch.Tensor, experts: PackedExperts, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the launcher; memory after all tensors is unmapped."""
    matrices, x = packed_on_host(experts, hidden.dtype), moved(hidden)
    with on_host(x):
        return token_launcher.run(x, *matrices, experts.activation, moved(ids), moved(weights))


@pytest.mark.parametrize(
    "kind",
    [KINDS["swiglu"], slow(KINDS["limited-fp16"]), KINDS["mxfp4-limited"]],
    ids=KINDS,
)
def test_error(kind: Kind) -> None:
    experts, hidden = experts_of(kind, 5, HIDDEN, INTERMEDIATE), random_hidden(1, HIDDEN, kind[3])
    for top_k in (1, 3, 5):
        ids, weights = random_routing(1, top_k, 5)
        out = run(hidden, experts, ids, weights)
        assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("swiglu", TokenPlan(split=3, groups=2, stages=2)),
        ("mxfp4-limited", TokenPlan(split=1, groups=4, stages=3)),
        slow("mxfp4-limited", TokenPlan(split=2, groups=1, stages=2, parts=3)),
        slow("limited-fp16", TokenPlan(split=1, groups=16, stages=1, parts=1)),
    ],
)
def test_ways_to_share_k(kind: str, plan: TokenPlan) -> None:
    """Groups with several tasks, none, or a different number; items whose last has fewer parts."""

    def plan_of(work: Work, top_k: int, gpu: Gpu) -> TokenPlan:
        fits = work.items(plan.parts) % plan.split == 0
        return plan if fits else plan._replace(split=1)

    experts = experts_of(KINDS[kind], 5, HIDDEN, INTERMEDIATE)
    ids, weights = random_routing(1, 3, 5)
    hidden = random_hidden(1, HIDDEN, KINDS[kind][3])
    with patch.object(token_launcher, "make_token_plan", plan_of):
        out = run(hidden, experts, ids, weights)
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize("absent", [-1, 5, 2**40])
def test_ids_of_no_expert(absent: int) -> None:
    """Ids of 32 bits, weights of 16; one expert twice."""
    experts, hidden = (
        experts_of(KINDS["mxfp4-limited"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(1, HIDDEN, BF16),
    )
    ids, weights = torch.tensor([[absent, 4, absent, 1, 4]]), random_routing(1, 5, 5)[1]
    if absent < 2**31:
        ids = ids.int()
    out = run(hidden, experts, ids, weights.to(BF16))
    assert_close_enough(out, hidden, experts, ids, weights)
    assert not run(hidden, experts, torch.full_like(ids, absent), weights).any()


def test_all_lanes_have_a_pair() -> None:
    """More experts than plans are made for: 32."""
    experts, hidden = experts_of(KINDS["swiglu"], 32, 64, 32), random_hidden(1, 64, BF16)
    ids, weights = random_routing(1, 32, 32)
    plan = TokenPlan(split=1, groups=3, stages=2)
    with patch.object(token_launcher, "make_token_plan", lambda *_: plan):
        out = run(hidden, experts, ids, weights)
    assert_close_enough(out, hidden, experts, ids, weights)


def test_experts_that_are_not_hit_are_not_read() -> None:
    experts, hidden = (
        experts_of(KINDS["swiglu"], 5, HIDDEN, INTERMEDIATE),
        random_hidden(1, HIDDEN, BF16),
    )
    ids, weights = torch.tensor([[0, 2]]), torch.ones(1, 2)
    expected = run(hidden, experts, ids, weights)
    spoil(experts, [1, 3, 4])
    assert torch.equal(run(hidden, experts, ids, weights), expected)


@pytest.mark.parametrize("exponent", [20, 139, 170])
def test_block_scales_of_any_size(exponent: int) -> None:
    """MXFP4's scales, also around 2^12, where the bfloat16 operand would overflow."""
    experts = experts_of(KINDS["mxfp4-limited"], 5, HIDDEN, INTERMEDIATE)
    experts.down.scales[:, ::3, 1:] = exponent
    hidden = random_hidden(1, HIDDEN, BF16)
    ids, weights = random_routing(1, 2, 5)
    assert_close_enough(run(hidden, experts, ids, weights), hidden, experts, ids, weights)
