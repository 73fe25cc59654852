"""The CUDA kernels for many tokens per expert on SM90, run on the CPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cuda_on_host
from halfbyte.linear.w4a16.gemv.plan import Gpu
from halfbyte.moe import PackedExperts
from halfbyte.moe.cuda import sums
from halfbyte.moe.cuda.gemm_sm90 import launcher, narrow, products
from halfbyte.moe.cuda.gemm_sm90.plan import MAX_NARROW_PAIRS, MoeGemmPlan
from halfbyte.moe.cuda.pairs import pairs_of
from halfbyte.moe.cuda.plan import Work
from halfbyte.moe.experts import WeightFormat
from moe.cases import LIMITED, assert_close_enough, random_hidden, random_routing
from moe.on_host import BF16, KINDS, experts_of, moved, packed_on_host, spoil
from slow import slow

pytestmark = cuda_on_host.needs_compiler

GPU = Gpu(90, 232448, 4, 2)


@contextmanager
def on_host(ctas_at_once: int = 2 * GPU.num_sms) -> Iterator[None]:
    """Let the launcher's kernels run on the CPU; memory that it allocates begins as NaN."""
    kernels = products.kernel_of, products.product_kernel
    caches = (*kernels, products.map_of, narrow._map_of_x)
    for cached in caches:
        cached.cache_clear()
    with (
        cuda_on_host.overlapping_kernels(GPU.compute_capability, ctas_at_once=ctas_at_once),
        cuda_on_host.tensor_maps_on_host(),
        ExitStack() as stack,
    ):
        for module in (launcher, narrow, products):
            stack.enter_context(patch.object(module, "gpu_of", lambda device: GPU))
        for module in (launcher, narrow, sums):
            stack.enter_context(patch.object(module, "allocate", cuda_on_host.allocate))
        yield
    for cached in caches:
        cached.cache_clear()


def run(
    hidden: torch.Tensor,
    experts: PackedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: int | None = None,
) -> torch.Tensor:
    """Run the launcher; memory after all tensors is unmapped."""
    matrices = packed_on_host(experts, hidden.dtype)
    with on_host():
        return launcher.run(
            moved(hidden), *matrices, experts.activation, moved(ids), moved(weights), tokens
        )


HIDDEN, INTERMEDIATE = 288, 160
"""Both end within a step, after its first chunk, and within a CTA's rows."""


def case(
    kind: str, m: int, top_k: int, num_experts: int = 3
) -> tuple[torch.Tensor, PackedExperts, torch.Tensor, torch.Tensor]:
    """Arguments of `run`."""
    experts = experts_of(KINDS[kind], num_experts, HIDDEN, INTERMEDIATE)
    return random_hidden(m, HIDDEN, KINDS[kind][3]), experts, *random_routing(m, top_k, num_experts)


@pytest.mark.parametrize("kind", KINDS)
def test_error(kind: str) -> None:
    arguments = case(kind, 33, 2)
    assert_close_enough(run(*arguments), *arguments)


@pytest.mark.parametrize(
    ("weight_format", "interleaved"), [("nvfp4", True), slow("mxfp4", False)], ids=str
)
def test_order_of_gate_and_up(weight_format: WeightFormat, interleaved: bool) -> None:
    """The other order than in `KINDS`."""
    kind = weight_format, replace(LIMITED, interleaved=interleaved), False, BF16
    experts = experts_of(kind, 2, HIDDEN, INTERMEDIATE)
    hidden, routing = random_hidden(9, HIDDEN, BF16), random_routing(9, 1, 2)
    assert_close_enough(run(hidden, experts, *routing), hidden, experts, *routing)


@pytest.mark.parametrize("tokens", [slow(16), 32, slow(128), slow(192), slow(256)])
def test_tiles_give_the_same_bits(tokens: int) -> None:
    """Also of one expert with all tokens; ids of 32 bits, weights of 16."""
    hidden, experts, ids, weights = case("swiglu", tokens + 30, 1)
    ids[: tokens + 20] = 1
    out = run(hidden, experts, ids.int(), weights.to(BF16), tokens)
    assert_close_enough(out, hidden, experts, ids, weights)
    assert torch.equal(out, run(hidden, experts, ids, weights, 64))


def test_weights_of_other_tokens_do_not_matter() -> None:
    """A warp of the sort has every 16th pair: here one with a weight that is NaN, then one that has
    no expert."""
    hidden, experts, ids, weights = case("swiglu", 200, 2)
    ids[11, 0] = -1
    expected = run(hidden, experts, ids, weights, 32)
    weights[3] = torch.nan
    out = run(hidden, experts, ids, weights, 32)
    assert out[3].isnan().all()
    out[3] = expected[3]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("swiglu", 1), ("mxfp4-limited", 2), slow("swiglu", 2), slow("mxfp4-limited", 1)],
)
def test_rings_that_go_round(kind: str, slots: int) -> None:
    """Stages of x and steps of W are not overwritten while they are still read."""
    arguments = case(kind, 40, 2)

    def small_plan(work: Work, tokens: int, block_bytes: int) -> MoeGemmPlan:
        return MoeGemmPlan(tokens, slots, 4)

    with patch.object(products, "make_plan", small_plan):
        for _ in range(2):
            assert_close_enough(run(*arguments, 32), *arguments)


@pytest.mark.parametrize(("kind", "slots"), [("swiglu", 1), slow("mxfp4-limited", 2)])
def test_slots_of_narrow_tiles_that_go_round(kind: str, slots: int) -> None:
    arguments = case(kind, 40, 2)

    def small_plan(work: Work, tokens: int, block_bytes: int) -> MoeGemmPlan:
        return MoeGemmPlan(tokens, slots, 2 * slots)

    with patch.object(products, "make_plan", small_plan):
        assert_close_enough(run(*arguments, 16), *arguments)


@pytest.mark.parametrize("ctas_at_once", [1, slow(2), slow(5)])
def test_narrow_tiles_where_ctas_have_no_room(ctas_at_once: int) -> None:
    """As beside another kernel: CTAs that start when others have ended compute down."""
    hidden, experts, ids, weights = case("swiglu", 40, 2)
    matrices = packed_on_host(experts, hidden.dtype)
    routing = moved(ids), moved(weights)
    with on_host(ctas_at_once):
        out = launcher.run(moved(hidden), *matrices, experts.activation, *routing, 16)
    assert torch.equal(out, run(hidden, experts, ids, weights, 16))


def test_more_pairs_than_a_cta_lists() -> None:
    arguments = case("swiglu", MAX_NARROW_PAIRS + 1, 1)
    with pytest.raises(ValueError, match="tiles of 16 tokens: 8193 pairs, at most 8192"):
        run(*arguments, 16)


def test_no_tokens() -> None:
    assert run(*case("swiglu", 0, 2)).shape == (0, HIDDEN)


@pytest.mark.parametrize("absent", [-1, 2**40])
def test_ids_of_no_expert(absent: int) -> None:
    hidden, experts, ids, weights = case("swiglu", 5, 2)
    ids[1], ids[2, 0] = absent, absent
    out = run(hidden, experts, ids, weights)
    assert not out[1].any()
    assert_close_enough(out, hidden, experts, ids, weights)
    weights[1], weights[2, 0] = torch.nan, torch.inf
    for tokens in (16, 32):
        assert torch.equal(run(hidden, experts, ids, weights, tokens), out)
    assert not run(hidden, experts, torch.full_like(ids, absent), weights).any()


def test_bits_do_not_depend_on_the_batch() -> None:
    hidden, experts, ids, weights = case("swiglu", 40, 2)
    whole = run(hidden, experts, ids, weights)
    for rows in (slice(0, 1), slice(4, 39)):
        assert torch.equal(run(hidden[rows], experts, ids[rows], weights[rows]), whole[rows])


def test_experts_that_are_not_hit_are_not_read() -> None:
    hidden, experts, ids, weights = case("swiglu", 5, 2, 5)
    ids[:] = torch.tensor([0, 2])
    expected = run(hidden, experts, ids, weights)
    spoil(experts, [1, 3, 4])
    assert torch.equal(run(hidden, experts, ids, weights), expected)


def test_subnormal_block_scales() -> None:
    arguments = case("swiglu", 5, 2)
    scales = arguments[1].down.scales.view(torch.uint8)
    scales.copy_(torch.randint(0, 8, scales.shape, generator=torch.Generator().manual_seed(0)))
    assert_close_enough(run(*arguments), *arguments)


@pytest.mark.parametrize("exponent", [20, 139, 140, 170])
def test_block_scales_of_any_size(exponent: int) -> None:
    """MXFP4's scales, also around 2^12, where the bfloat16 operand would overflow."""
    arguments = case("mxfp4-limited", 5, 2)
    arguments[1].down.scales[:, ::3, 1:] = exponent
    assert_close_enough(run(*arguments), *arguments)


def test_sizes_of_whole_tiles() -> None:
    experts = experts_of(KINDS["swiglu"], 2, 256, 128)
    hidden, routing = random_hidden(9, 256, BF16), random_routing(9, 1, 2)
    assert_close_enough(run(hidden, experts, *routing), hidden, experts, *routing)


def sorted_pairs(ids: torch.Tensor, num_experts: int, h: int, tokens: int) -> Any:
    """Results of the sort kernel, and the hidden states that it was given."""
    hidden = random_hidden(ids.shape[0], h, BF16)
    weights = torch.ones(ids.shape)
    with on_host():
        pairs = pairs_of(ids, weights, num_experts)
        return launcher._sort(hidden, pairs, tokens, 0), hidden


@pytest.mark.parametrize("num_experts", [3, 40])
def test_sort(num_experts: int) -> None:
    """Positions of each expert begin at multiples of 16, in ascending order of pairs."""
    ids, _ = random_routing(90, 3, num_experts)
    ids[5, 1] = ids[80, 0] = -1
    found, hidden = sorted_pairs(ids, num_experts, 160, 64)
    positions, weights = found.places.view(-1, 2).t().contiguous()
    assert (weights.view(torch.float32) == 1).all()
    tiles = []
    assert (positions[[16, 240]] == -1).all()
    start = 0
    for expert in range(num_experts):
        pairs = (ids.flatten() == expert).nonzero().flatten()
        assert torch.equal(positions[pairs], start + torch.arange(len(pairs), dtype=torch.int32))
        for first in range(0, len(pairs), 64):
            tiles.append((start + first, expert << 16 | min(64, len(pairs) - first)))
        start += -(-len(pairs) // 16) * 16
    assert start <= found.x.shape[0]
    assert found.tiles.num_tiles.item() == len(tiles) <= found.tiles.max_tiles
    assert found.tiles.tiles.view(-1, 2)[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    # Position 16 (2 j + h) + 8 q + 2 c + b of 64 values has value 16 c + 8 j + 4 h + 2 q + b.
    value = torch.arange(256).view(4, 4, 2, 2, 2, 2).permute(0, 2, 3, 4, 1, 5).flatten()
    padded = torch.nn.functional.pad(hidden, (0, 256 - 160))
    pairs = (ids.flatten() >= 0).nonzero().flatten()
    assert torch.equal(found.x[positions[pairs].long()], padded[pairs // 3][:, value])


@pytest.mark.parametrize(("m", "num_experts"), [(90, 3), (90, 40), (700, 2), (1500, 2)])
def test_list(m: int, num_experts: int) -> None:
    """Rows of each expert begin at multiples of 16; all of its pairs have one, in any order."""
    ids, weights = random_routing(m, 3, num_experts) if num_experts > 2 else one_in_two(m)
    top_k = ids.shape[1]
    ids[5, 1] = ids[80, 0] = -1
    with on_host():
        pairs = pairs_of(ids, weights, num_experts)
        found = narrow.list_pairs(pairs, 0)
    rows, bits = found.places.view(-1, 2).t().contiguous()
    assert torch.equal(bits.view(torch.float32), weights.flatten())
    assert (rows[[5 * top_k + 1, 80 * top_k]] == -1).all()
    tiles: list[list[int]] = []
    start = 0
    for expert in range(num_experts):
        own = (ids.flatten() == expert).nonzero().flatten()
        assert rows[own].sort().values.tolist() == list(range(start, start + len(own)))
        for first in range(0, len(own), 16):
            tiles.append([start + first, expert << 16 | min(16, len(own) - first)])
        start += -(-len(own) // 16) * 16
    present = (ids.flatten() >= 0).nonzero().flatten()
    assert torch.equal(found.tokens[rows[present].long()].long(), present // top_k)
    assert found.tiles.num_tiles.item() == len(tiles) <= found.tiles.max_tiles
    assert found.tiles.tiles.view(-1, 2)[: len(tiles)].tolist() == tiles
    assert not found.counters.any()
    assert not found.written[: 2 * len(tiles)].any()


def one_in_two(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights `[m, 2]` of two experts."""
    ids = torch.tensor([[0, 1]]).repeat(m, 1)
    return ids, torch.rand(m, 2, generator=torch.Generator().manual_seed(0))
