"""The grouped Triton kernels: interpreted on a CPU, compiled for GPUs, run on one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.moe import SWIGLU, GatedActivation, MoeConfig, PackedExperts, moe_experts
from halfbyte.moe.experts import WeightFormat
from halfbyte.moe.triton import TritonKernel
from moe.cases import (
    LIMITED,
    assert_close_enough,
    dequantized,
    on_gpu,
    random_experts,
    random_hidden,
    random_routing,
)
from moe.on_host import packed_on_host
from slow import CAPABILITIES, slow

pytest.importorskip("triton")

from halfbyte.linear.w4a16.triton_kernel import Tiles
from halfbyte.moe.triton_kernel import (
    ProductKey,
    ProductTiles,
    choose_tiles,
    grouped_kernel,
    kernel_constants,
)
from halfbyte.moe.triton_routing import max_tiles, sort_kernel, sum_kernel
from triton_compiler import SHARED_BYTES, compile_kernel
from triton_interpreter import interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHORT_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KINDS: list[tuple[WeightFormat, GatedActivation, bool]] = [
    ("nvfp4", SWIGLU, False),
    ("nvfp4", LIMITED, True),
    ("mxfp4", LIMITED, True),
    ("mxfp4", SWIGLU, False),
]


def interpret(
    hidden: torch.Tensor,
    experts: PackedExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The launcher in the interpreter; with `packed`, on weights in the CUDA kernels' order."""
    launcher = interpreted("halfbyte.moe.triton_launcher")

    def matrices(name: str) -> Any:
        found = getattr(experts, name)
        return launcher.MatrixTensors(found.weight, found.scales, found.global_scale, found.bias)

    both = matrices("gate_up"), matrices("down")
    if packed:
        both = packed_on_host(experts, hidden.dtype)
    result: torch.Tensor = launcher.moe_triton(
        hidden, *both, experts.activation, ids, weights, **options
    )
    return result


def pair(tiles: Tiles) -> ProductTiles:
    """The same tiles for both products."""
    return ProductTiles(tiles, tiles)


@pytest.mark.parametrize("batch_invariant", [slow(False), True])
@pytest.mark.parametrize("kind", KINDS[:3], ids=["swiglu", "limited", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error(
    dtype: torch.dtype, kind: tuple[WeightFormat, GatedActivation, bool], batch_invariant: bool
) -> None:
    weight_format, activation, bias = kind
    if weight_format == "mxfp4" and dtype == torch.float16:
        pytest.skip("refused by name")
    options: Any = {"activation": activation, "bias": bias, "dtype": dtype}
    experts = random_experts(3, 64, 64, weight_format=weight_format, **options)
    for m, top_k in ((1, 3), (25, 2)):
        ids, weights = random_routing(m, top_k, 3)
        hidden = random_hidden(m, 64, dtype)
        out = interpret(hidden, experts, ids, weights, batch_invariant=batch_invariant)
        assert_close_enough(out, hidden, experts, ids, weights)


def test_sizes_that_fill_no_tile() -> None:
    experts = random_experts(3, 80, 48)
    ids, weights = random_routing(20, 2, 3)
    hidden = random_hidden(20, 80)
    out = interpret(hidden, experts, ids.int(), weights, tiles=pair(Tiles(16, 32, 64, 4, 2)))
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (KINDS[0], torch.bfloat16),
        (KINDS[1], torch.float16),
        (KINDS[2], torch.bfloat16),
        slow(KINDS[1], torch.bfloat16),
    ],
    ids=["swiglu", "limited-fp16", "mxfp4", "limited"],
)
@pytest.mark.parametrize(("h", "i"), [(96, 32), slow(192, 160)])
def test_packed_weights_give_the_bits_of_those_as_loaded(
    kind: Any, dtype: torch.dtype, h: int, i: int
) -> None:
    """Also of subnormal scales, and of blocks with scale 0."""
    weight_format, activation, bias = kind
    options: Any = {"activation": activation, "bias": bias, "dtype": dtype}
    experts = random_experts(3, h, i, weight_format=weight_format, **options)
    if weight_format == "nvfp4":
        scales = experts.gate_up.scales.view(torch.uint8)
        scales[:, 1::4] = torch.arange(scales.shape[2], dtype=torch.uint8) % 8
    ids, weights = random_routing(20, 2, 3)
    arguments = random_hidden(20, h, dtype), experts, ids, weights
    expected = interpret(*arguments, tiles=pair(Tiles(16, 32, 64, 4, 2)))
    assert torch.equal(
        interpret(*arguments, packed=True, tiles=pair(Tiles(16, 32, 64, 4, 2))), expected
    )


def test_many_tiles_of_one_expert() -> None:
    """More tiles than are grouped to share weights, between experts without tokens."""
    experts = random_experts(4, 64, 32)
    ids, weights = torch.full((140, 1), 2), torch.full((140, 1), 0.5)
    hidden = random_hidden(140, 64)
    out = interpret(hidden, experts, ids, weights, tiles=pair(Tiles(16, 32, 32, 4, 2)))
    assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.parametrize("absent", [-1, 4, 2**40])
def test_ids_of_no_expert(absent: int) -> None:
    experts, hidden = random_experts(), random_hidden(6, 64)
    ids, weights = random_routing(6, 2, 4)
    ids[1], ids[2, 0] = absent, absent
    out = interpret(hidden, experts, ids, weights)
    assert not out[1].any()
    assert_close_enough(out, hidden, experts, ids, weights)


def test_no_tokens() -> None:
    ids, weights = random_routing(0, 2, 4)
    assert interpret(random_hidden(0, 64), random_experts(), ids, weights).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dense_layer_is_the_case_of_one_expert(dtype: torch.dtype) -> None:
    """The second product of one expert has the bits of the dense kernel."""
    experts = random_experts(1, 80, 64)
    down, tiles = experts.down, Tiles(16, 32, 32, 4, 2)
    launcher, routing = (
        interpreted(f"halfbyte.moe.triton_{name}") for name in ("launcher", "routing")
    )
    ids, weights = torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1)
    matrices = launcher.MatrixTensors(down.weight, down.scales, down.global_scale, None)
    sorted_pairs = routing.sort_pairs(ids, 1, tiles.m)
    x = random_hidden(20, 64, dtype)
    out = launcher._launch(x, matrices, None, sorted_pairs, 1, weights, tiles)
    linear = interpreted("halfbyte.linear.w4a16.triton_kernel").linear_triton
    expected = linear(x, down.weight[0], down.scales[0], down.row_scales()[0], tiles=tiles)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_batch(rows_alike: None, dtype: torch.dtype) -> None:
    experts = random_experts(2, 80, 48, activation=LIMITED, bias=True, dtype=dtype)
    ids, weights = random_routing(70, 2, 2)
    hidden = random_hidden(70, 80, dtype)
    whole = interpret(hidden, experts, ids, weights, batch_invariant=True)
    for rows in (slice(0, 1), slice(31, 33), slice(69, 70)):
        part = interpret(hidden[rows], experts, ids[rows], weights[rows], batch_invariant=True)
        assert torch.equal(part, whole[rows])


def test_experts_that_are_not_hit_are_not_read() -> None:
    experts, hidden = random_experts(), random_hidden(5, 64)
    ids, weights = torch.tensor([[0, 2]]).repeat(5, 1), torch.ones(5, 2)
    expected = interpret(hidden, experts, ids, weights)
    for matrices in (experts.gate_up, experts.down):
        matrices.scales.view(torch.uint8)[[1, 3]] = 0x7F  # NaN
        assert matrices.global_scale is not None
        matrices.global_scale[[1, 3]] = torch.nan
    assert torch.equal(interpret(hidden, experts, ids, weights), expected)


@pytest.mark.parametrize("m", [1, 5, 300])
@pytest.mark.parametrize("tile_m", [16, 64])
def test_sorted_pairs(m: int, tile_m: int) -> None:
    ids, _ = random_routing(m, 3, 7)
    ids[m // 2, 1] = -1
    routing = interpreted("halfbyte.moe.triton_routing").sort_pairs(ids, 7, tile_m)
    flat = ids.flatten()
    expected = [flat.eq(expert).nonzero().flatten().tolist() for expert in range(7)]
    found: list[list[int]] = [[] for _ in range(7)]
    for expert, begin, end in routing.tiles.t().tolist():
        if expert >= 0:
            assert 0 < end - begin <= tile_m
            found[expert] += routing.pairs[begin:end].tolist()
    assert found == expected
    used = sum(-(-len(pairs) // tile_m) for pairs in expected)
    assert (routing.tiles[0] >= 0).sum() == used <= max_tiles(3 * m, 7, tile_m)


def test_max_tiles_is_reached() -> None:
    assert max_tiles(8, 128, 16) == 8
    assert max_tiles(128 + 32, 128, 16) == 128 + 2  # one each, then 16 more for two of them
    assert max_tiles(5, 1, 4) == 2


def product_of(
    experts: PackedExperts, gated: bool, packed_for: torch.dtype | None = None
) -> ProductKey:
    matrices = experts.gate_up if gated else experts.down
    scale = matrices.global_scale
    return ProductKey(
        experts.activation if gated else None,
        matrices.format,
        0 if scale is None else scale.shape[1],
        2048,
        matrices.bias is not None,
        packed_for,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "kind", "num_pairs"),
    [
        (torch.bfloat16, KINDS[0], 8),
        slow(torch.bfloat16, KINDS[0], 128 * 20),
        slow(torch.bfloat16, KINDS[0], 128 * 50),
        (torch.bfloat16, KINDS[0], 65536),
        slow(torch.bfloat16, KINDS[2], 8),
        slow(torch.bfloat16, KINDS[2], 65536),
        slow(torch.float16, KINDS[1], 65536),
        slow(torch.float32, KINDS[1], 8),
    ],
)
@pytest.mark.parametrize("packed", [slow(False), True])
def test_compiles_without_spills(
    dtype: torch.dtype, kind: Any, num_pairs: int, packed: bool, capability: int
) -> None:
    if packed and dtype == torch.float32:
        pytest.skip("packed for 16 bits")
    weight_format, activation, bias = kind
    experts = random_experts(1, weight_format=weight_format, activation=activation, bias=bias)
    tiles = choose_tiles(num_pairs, 128, dtype, capability, False)
    short = SHORT_NAMES[dtype]
    types = {
        **dict.fromkeys(("x", "out", "bias"), f"*{short}"),
        **dict.fromkeys(("weight", "scales"), "*u8"),
        **dict.fromkeys(("global_scale", "pair_weights"), "*fp32"),
        **dict.fromkeys(("pairs", "tiles"), "*i32"),
    }
    for gated, own in ((True, tiles.gate_up), (False, tiles.down)):
        usage = compile_kernel(
            grouped_kernel,
            types,
            kernel_constants(dtype, product_of(experts, gated, dtype if packed else None), own),
            capability,
            num_warps=own.num_warps,
            num_stages=own.num_stages,
        )
        assert usage.shared <= SHARED_BYTES[capability]
        assert usage.stack <= 16


@pytest.mark.parametrize("capability", [80, slow(90), slow(100), slow(120)])
def test_routing_compiles(capability: int) -> None:
    types = {"topk_ids": "*i64", "pairs": "*i32", "tiles": "*i32", "out": "*bf16"}
    constants = {"num_experts": 128, "bins": 256, "chunk": 2048, "tile_m": 64}
    assert compile_kernel(sort_kernel, types, constants, capability, num_warps=4).stack <= 16
    types["results"] = "*bf16"
    constants = {"top_k": 8, "tile": 1024}
    assert compile_kernel(sum_kernel, types, constants, capability, num_warps=4).stack <= 16


def test_says_what_it_cannot_do() -> None:
    config = MoeConfig(4, 64, 32, torch.bfloat16, device_type="cuda", compute_capability=90)
    assert TritonKernel.can_implement(config) == (True, "every shape, batch-invariant")
    for change, reason in {
        ("device_type", "cpu"): "tensors are on cpu, not on a GPU",
        ("dtype", torch.float16): "MXFP4's powers of two exceed float16's range",
    }.items():
        name, value = change
        changed = replace(config, weight_format="mxfp4", **{name: value})  # type: ignore[arg-type]
        assert TritonKernel.can_implement(changed) == (False, reason)
    assert TritonKernel.is_supported(75) == (False, "needs compute capability 8.0, this is 7.5")
    assert TritonKernel.is_supported(90)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=["swiglu", "limited", "mxfp4-limited", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_on_a_gpu(dtype: torch.dtype, kind: Any) -> None:
    weight_format, activation, bias = kind
    if weight_format == "mxfp4" and dtype == torch.float16:
        pytest.skip("refused by name")
    experts = on_gpu(
        random_experts(
            8, 288, 160, weight_format=weight_format, activation=activation, bias=bias, dtype=dtype
        )
    )
    assert dequantized(experts.down, False).is_cuda
    for m, top_k in ((0, 2), (1, 3), (7, 1), (130, 2), (600, 4)):
        ids, weights = (t.cuda() for t in random_routing(m, top_k, 8))
        hidden = random_hidden(m, 288, dtype).cuda()
        for batch_invariant in (False, True):
            out = moe_experts(hidden, experts, ids, weights, batch_invariant=batch_invariant)
            assert_close_enough(out, hidden, experts, ids, weights)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    experts = on_gpu(random_experts(8, 288, 160))
    ids, weights = (t.cuda() for t in random_routing(9, 2, 8))
    hidden = random_hidden(9, 288).cuda()
    moe_experts(hidden, experts, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(hidden, experts, ids, weights)
    ids.copy_(random_routing(9, 2, 8, seed=3)[0])
    graph.replay()
    assert torch.equal(out, moe_experts(hidden, experts, ids, weights))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_batch_on_a_gpu() -> None:
    experts = on_gpu(random_experts(8, 288, 160, dtype=torch.bfloat16))
    ids, weights = (t.cuda() for t in random_routing(200, 2, 8))
    hidden = random_hidden(200, 288, torch.bfloat16).cuda()
    whole = moe_experts(hidden, experts, ids, weights, batch_invariant=True)
    for rows in (slice(0, 1), slice(31, 33), slice(7, 150)):
        part = moe_experts(hidden[rows], experts, ids[rows], weights[rows], batch_invariant=True)
        assert torch.equal(part, whole[rows])
