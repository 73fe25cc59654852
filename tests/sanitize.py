"""Small calls of our kernels for compute-sanitizer: attention, stores, linear layers, experts.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py decode wide experts

Inputs are made and outputs checked on the CPU, so that nearly all that runs on the GPU is ours. To
run several parts at a time, give each one thread (OMP_NUM_THREADS=1): it is ten times as fast.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from attention.cases import (
    RECENT_CASES,
    TRANSFORM_CASES,
    Case,
    assert_close_to_exact,
    make_case,
)
from attention.prefill.dense_cases import inputs_of
from halfbyte.attention import paged_attention
from halfbyte.attention.prefill.key_ranges import KeyRanges
from halfbyte.elementwise import (
    add_rms_norm,
    qk_norm_rotary_embedding,
    rotary_embedding,
    silu_and_mul,
)
from halfbyte.kvcache import read_tokens, reshape_and_cache
from halfbyte.layouts import PageLayout
from halfbyte.moe import GPT_OSS, SWIGLU, moe_experts, route, route_reference
from halfbyte.numerics import nvfp4
from kvcache.store.recipe_cases import (
    RECIPE_OPTIONS,
    WEIGHTED_OPTIONS,
    assert_stored_as_by_the_reference,
)
from kvcache.transforms import on
from linear.cases import random_input, random_layer
from moe.cases import (
    LIMITED,
    assert_close_enough,
    on_gpu,
    packed_matrices,
    random_experts,
    random_hidden,
    random_routing,
)
from moe.routers import SHAPES, assert_routes, exact_case

ONE_QUERY: dict[str, Any] = {"query_lens": (1,) * 5, "seq_lens": (1, 40, 0, 300, 129)}
SEVERAL: dict[str, Any] = {"query_lens": (3, 4, 4), "seq_lens": (40, 163, 400)}
DECODE: dict[str, dict[str, Any]] = {
    "four-columns": {"head_size": 128, **ONE_QUERY},
    "eight-columns": {"head_size": 64, "group": 8, "sinks": True, **ONE_QUERY},
    "several-queries": {"head_size": 128, "sliding_window": 100, **SEVERAL},
    "head-size-256": {"head_size": 256, "block_size": 64, **ONE_QUERY},
    "nhd": {"head_size": 128, "order": "NHD", **ONE_QUERY},
    "fp8": {"head_size": 128, "k_dtype": "fp8_e4m3", **ONE_QUERY},
    "bfloat16": {"head_size": 128, "k_dtype": "bfloat16", **ONE_QUERY},
    "float16": {"head_size": 128, "query_dtype": torch.float16, **ONE_QUERY},
    "one-long": {"head_size": 128, "query_lens": (1,), "seq_lens": (9000,)},
    "many-short": {"head_size": 64, "query_lens": (1,) * 60, "seq_lens": tuple(range(60))},
    "different-head-sizes": {"head_size": 128, "head_size_v": 64, **ONE_QUERY},
    "soft-cap": {"head_size": 128, "softcap": 20.0, **ONE_QUERY},
    "mixed-formats": {"head_size": 128, "k_dtype": "fp8_e4m3", "v_dtype": "nvfp4", **ONE_QUERY},
}
WIDE: dict[str, dict[str, Any]] = {
    "several-heads": {"head_size": 128, "group": 32, **ONE_QUERY},
    "nhd": {"head_size": 64, "group": 32, "order": "NHD", **ONE_QUERY},
    "whole-pages": {"head_size": 128, "group": 32, "kv_heads": 1, **ONE_QUERY},
    "whole-pages-of-64": {
        "head_size": 64,
        "group": 8,
        "kv_heads": 1,
        "block_size": 64,
        "sliding_window": 100,
        **SEVERAL,
    },
    "whole-pages-64-columns": {
        "head_size": 256,
        "group": 64,
        "kv_heads": 1,
        "block_size": 32,
        **ONE_QUERY,
    },
}
TRITON: dict[str, dict[str, Any]] = {
    "head-size-80": {"head_size": 80},
    "different-head-sizes": {"head_size": 192, "head_size_v": 128, "sinks": True},
    "sm100": {"head_size": 128, "v_scale_layout": "sm100", "sliding_window": 20},
    "nhd": {"head_size": 64, "order": "NHD", "softcap": 20.0},
}
PROMPTS: dict[str, Any] = {"query_lens": (20, 70, 40), "seq_lens": (20, 200, 90)}
ROWS: dict[str, dict[str, Any]] = {
    "causal": {"head_size": 128, "sinks": True},
    "window": {"head_size": 64, "sliding_window": 30},
    "large-window": {"head_size": 64, "sliding_window": 600},
    "soft-cap": {"head_size": 128, "softcap": 20.0, "sliding_window": 30},
    "wider-keys": {"head_size": 192, "head_size_v": 128},
    "head-size-256": {"head_size": 256, "query_dtype": torch.float16},
}
ORDERS: tuple[tuple[Any, Any], ...] = (("HND", "linear"), ("NHD", "linear"), ("HND", "sm100"))
FORMATS = ("nvfp4", "nvfp4_4over6", "fp8_e4m3", "mxfp4", "bfloat16")
BF16, FP16 = torch.bfloat16, torch.float16
EXPERTS: dict[str, dict[str, Any]] = {
    "nvfp4": {"weight_format": "nvfp4", "activation": SWIGLU, "dtype": BF16},
    "nvfp4-biases-fp16": {
        "weight_format": "nvfp4",
        "activation": LIMITED,
        "bias": True,
        "dtype": FP16,
    },
    "mxfp4": {"weight_format": "mxfp4", "activation": SWIGLU, "dtype": BF16},
    "gpt-oss": {"weight_format": "mxfp4", "activation": GPT_OSS, "bias": True, "dtype": BF16},
}
"""Neither size is a multiple of a tile."""
ROUTED: dict[str, tuple[int, int]] = {
    "none": (0, 2),
    "one": (1, 3),
    "few": (13, 2),
    "many": (330, 4),
}
"""Tokens and experts per token: many are a case of `gemm.cu` on SM90, elsewhere of Triton."""


def attend(case: Case, backend: str | None, **options: Any) -> None:
    """On the GPU, against float64 on the CPU; without a backend, on the fastest."""
    arguments: dict[str, Any] = {
        name: on(value, "cuda") for name, value in case.arguments().items()
    }
    arguments.update(options, backend=backend)
    out = paged_attention(case.query.cuda(), case.pages.cuda(), **arguments)
    assert_close_to_exact(out.cpu(), case)


def decode() -> None:
    """`decode.cu` with plan and merge."""
    for name, options in DECODE.items():
        print("decode", name, flush=True)
        attend(make_case(**options), "cuda")
    attend(make_case(**DECODE["eight-columns"]), "cuda", batch_invariant=True)


def wide() -> None:
    """`decode_wgmma.cu`, for many query columns on SM90."""
    for name, options in WIDE.items():
        print("wide", name, flush=True)
        attend(make_case(**options), "cuda")


def triton() -> None:
    """The general attention kernel."""
    for dtype in FORMATS:
        print("triton", dtype, flush=True)
        attend(make_case(k_dtype=dtype, head_size=64), "triton")
    for name, options in TRITON.items():
        print("triton", name, flush=True)
        attend(make_case(**options), "triton")
    attend(make_case(), "triton", batch_invariant=True)


def prefill() -> None:
    """Our prefill kernel; and unpacking and merging around PyTorch's attention."""
    from halfbyte.attention.prefill.combine import combine
    from halfbyte.attention.prefill.unpack import unpack_into

    for name, options in ROWS.items():
        print("prefill", name, flush=True)
        attend(make_case(**PROMPTS, **options), "dense")
    lengths = (64, 200, 3)
    for dtype in FORMATS:
        print("prefill", dtype, flush=True)
        case = make_case(k_dtype=dtype, query_lens=(1, 1, 1), seq_lens=lengths)
        layout, scales = case.layout, (case.k_scale, case.v_scale)
        wanted = read_tokens(case.pages, torch.cat(case.slots), layout, *scales)
        key, value = (torch.empty_like(x, device="cuda") for x in wanted)
        rows = torch.tensor([(0, 0, 0), lengths, (0, 64, 264)], dtype=torch.int32).cuda()
        ranges = KeyRanges(slice(None), sum(lengths), max(lengths), *rows)
        unpack_into(key, value, inputs_of(case, "cuda"), ranges)
        assert torch.equal(key.cpu(), wanted[0])
        assert torch.equal(value.cpu(), wanted[1])
    outs, logs = torch.randn(3, 50, 8, 64), torch.randn(3, 8, 50)
    exact = (outs * logs.softmax(0).transpose(1, 2)[..., None]).sum(0)
    out = torch.empty(50, 8, 64, device="cuda")
    parts = [(out.cuda(), log.cuda()) for out, log in zip(outs, logs, strict=True)]
    combine(parts, None, out, torch.empty(50, 8, device="cuda"))
    assert (out.cpu() - exact).abs().max() < 1e-5


def store() -> None:
    """The store of every format and order; some slots are padding."""
    orders = [(dtype, *ORDERS[0]) for dtype in FORMATS] + [
        ("nvfp4", *order) for order in ORDERS[1:]
    ]
    for dtype, order, v_scale_layout in orders:
        for tokens in (70, 600):
            print("store", dtype, order, v_scale_layout, tokens, flush=True)
            layout = PageLayout(dtype, dtype, 128, None, 3, 16, order, v_scale_layout)
            key, value = torch.randn(2, tokens, 3, 128).bfloat16()
            slots = torch.randperm(640)[:tokens]
            slots[::7] = -1
            pages = torch.zeros(40, layout.page_bytes, dtype=torch.uint8)
            on_gpu = pages.cuda()
            given = key.cuda(), value.cuda()
            reshape_and_cache(*given, on_gpu, slots.cuda(), layout, 0.002, 0.003)
            reshape_and_cache(key, value, pages, slots, layout, 0.002, 0.003, backend="reference")
            assert torch.equal(on_gpu.cpu(), pages)


def transformed() -> None:
    """Decode and prefill of transformed K."""
    attend_each(TRANSFORM_CASES)


def recent() -> None:
    """The same with last tokens in rings."""
    attend_each(RECENT_CASES)


def attend_each(cases: dict[str, dict[str, Any]]) -> None:
    """On the fastest backend, and on the general one."""
    for name, options in cases.items():
        for backend in (None, "triton"):
            print("recipes", name, backend, flush=True)
            attend(make_case(**options), backend)


def recipe_stores() -> None:
    """The store of every recipe."""
    for options in RECIPE_OPTIONS + WEIGHTED_OPTIONS:
        print("recipes", options, flush=True)
        assert_stored_as_by_the_reference(reshape_and_cache, options, BF16, "cuda")


def small() -> None:
    """Norms, SwiGLU and rotary embedding, also of normalized heads."""

    def normed(*tensors: torch.Tensor) -> Any:
        return qk_norm_rotary_embedding(*tensors[:5], 1e-5, tensors[5], 128, False)

    angles = torch.rand(50, 32)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    for rows in (1, 7, 600):
        print("small", rows, flush=True)
        x, residual = torch.randn(2, rows, 4096).bfloat16()
        weight, positions = torch.randn(4096).bfloat16(), torch.randint(50, (rows,))
        head_weights = weight[:128], weight[128:256]
        for call, tensors, options in (
            (add_rms_norm, (x, residual, weight), (1e-5,)),
            (silu_and_mul, (x,), ()),
            (rotary_embedding, (positions, x[:, :3072], x[:, 3072:], table), (128, False)),
            (normed, (positions, x[:, :3072], x[:, 3072:], *head_weights, table), ()),
        ):
            found = call(*(tensor.cuda() for tensor in tensors), *options)
            torch.testing.assert_close(found, call(*tensors, *options), check_device=False)


def linear() -> None:
    """Small and large M: `gemv.cu`, and `gemm_sm90/gemm.cu` or `dequant.cu`; Triton."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for backend, dtype, n, k, batch_invariant in (
        ("cuda", bf16, 200, 144, False),
        ("cuda", bf16, 1000, 1040, False),
        ("cuda", bf16, 1000, 1040, True),
        ("cuda", fp16, 1000, 1040, False),
        ("cuda", bf16, 100, 4096, False),
        ("triton", bf16, 200, 144, False),
    ):
        options: dict[str, Any] = {"dtype": dtype, "bias": True}
        layer = random_layer(n, k, backend="reference", **options)
        options["batch_invariant"] = batch_invariant
        on_gpu = random_layer(n, k, backend=backend, **options).cuda()
        weight = layer.dequantize(torch.float64)
        for m in (1, 9, 40, 200, 700):
            print("linear", backend, dtype, n, k, batch_invariant, m, flush=True)
            x = random_input(m, k, dtype)
            assert layer.bias is not None
            exact = F.linear(x.double(), weight, layer.bias.double())
            error = (on_gpu(x.cuda()).cpu().double() - exact).abs().max()
            assert error <= 0.01 * exact.abs().max()


def unpacked() -> None:
    """Weights dequantized by `dequant.cu`, as for large M on GPUs other than SM90."""
    from halfbyte.linear.w4a16.dequant.launcher import unpack

    n, k = 300, 1104
    layer, weight, scale, rows = packed_on_gpu(n, k)
    out = unpack(weight, scale, rows, 64, n - 64, k, torch.bfloat16)
    global_scale = layer.loaded_scale("weight_global_scale")
    codes, scales = layer.loaded_weights()
    wanted = nvfp4.dequantize(codes, scales, global_scale, torch.bfloat16)
    assert torch.equal(out.cpu(), wanted[64:])


def packed_on_gpu(n: int, k: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer on the CPU, and its weights packed for our CUDA kernels."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "bias": True}
    packed = random_layer(n, k, backend="cuda", **options).cuda()
    packed.process_weights_after_loading()
    tensors = {**dict(packed.named_parameters()), **dict(packed.named_buffers())}
    names = ("weight", "weight_scale", "weight_row_scale")
    weight, scale, rows = (tensors[name] for name in names)
    return random_layer(n, k, backend="reference", **options), weight, scale, rows


def cuts() -> None:
    """Tiles of `gemm_sm90/gemm.cu`, whole and cut, with more steps than its ring has places."""
    from halfbyte.linear.w4a16.gemm_sm90.plan import TILES

    gemm_tiles("cuts", TILES, 700, 0.01)


def swiglu() -> None:
    """The same with SwiGLU, where a cluster's second CTA may have no rows."""
    from halfbyte.linear.w4a16.gemm_sm90.plan import SWIGLU_TILES

    gemm_tiles("swiglu", SWIGLU_TILES, 640, 0.02, swiglu=True)


def gemm_tiles(
    name: str, among: Sequence[Any], n: int, tolerance: float, *, swiglu: bool = False
) -> None:
    """The GEMM with each tile of `among`, compared with float64.

    Args:
        n: rows of W.
        tolerance: relative to the largest result.
    """
    from halfbyte.linear.w4a16.gemm_sm90.launcher import gemm_product
    from halfbyte.linear.w4a16.gemm_sm90.plan import GemmPlan

    if torch.cuda.get_device_capability() != (9, 0):
        return
    k, m = 1104, 150
    layer, weight, scale, rows = packed_on_gpu(n, k)
    x, bias = random_input(m, k, torch.bfloat16), layer.bias
    exact = F.linear(x.double(), layer.dequantize(torch.float64), bias.double())
    if swiglu:
        gate, up = exact.bfloat16().double().chunk(2, dim=-1)
        exact = F.silu(gate) * up
    for tile in among:
        tiles = tile.pairs(n, m)
        for clusters, cut in ((tiles, 0), (tiles + 1, tiles), (3 * tiles, tiles)):
            print(name, tile, clusters, cut, flush=True)
            plan = GemmPlan(tile, tiles, clusters, cut)
            product = gemm_product(x.shape, n, x.dtype, 0, plan, swiglu)
            out = product(x.cuda(), weight, scale, rows, bias.cuda())
            error = (out.cpu().double() - exact).abs().max()
            assert error <= tolerance * exact.abs().max()


def experts() -> None:
    """`token.cu`, `experts.cu` and, on SM90, `gemm_sm90/`; Triton. Two of eight experts get no
    token."""
    for name, options in EXPERTS.items():
        for h, i in ((608, 96), (96, 544)):
            made = random_experts(8, h, i, **options)
            there = on_gpu(made)
            for tokens, (m, top_k) in ROUTED.items():
                ids, weights = random_routing(m, top_k, 6)
                ids[m // 2 :: 7, :1] = -1  # of another rank
                x = random_hidden(m, h, options["dtype"])
                for backend in ("cuda", "triton"):
                    print("experts", name, h, i, tokens, backend, flush=True)
                    given = x.cuda(), there, ids.cuda(), weights.cuda()
                    out = moe_experts(*given, backend=backend)
                    assert_close_enough(out.cpu(), x, made, ids, weights)


def routers() -> None:
    """`router.cu`, on SM90 and later."""
    for shape in SHAPES:
        for m in (1, 9, 64):
            print("router", *shape, m, flush=True)
            x, gate, bias = (t.cuda() for t in exact_case(shape, m))
            padding = torch.arange(m, device="cuda") % 3 == 2
            found = route(x, gate, shape[2], bias=bias, padding=padding)
            assert_routes(found, route_reference(x, gate, shape[2], bias=bias, padding=padding))


def tiles() -> None:
    """All tile widths of `moe/cuda/gemm_sm90/`; two experts get no token, or one takes all."""
    from halfbyte.moe.cuda.gemm_sm90.launcher import run
    from halfbyte.moe.cuda.gemm_sm90.plan import TOKENS

    if torch.cuda.get_device_capability() != (9, 0):
        return
    for name, options in EXPERTS.items():
        made = random_experts(8, 1632, 608, **options)  # more steps than rings have slots
        matrices = packed_matrices(on_gpu(made), options["dtype"])
        x = random_hidden(150, 1632, options["dtype"])
        one = torch.full((150, 1), 5), torch.ones(150, 1)
        for ids, weights in (random_routing(150, 2, 6), one):
            for tokens in TOKENS:
                print("tiles", name, tokens, ids.shape[1], flush=True)
                routing = ids.cuda(), weights.cuda()
                out = run(x.cuda(), *matrices, made.activation, *routing, tokens)
                assert_close_enough(out.cpu(), x, made, ids, weights)
    small = random_experts(8, 608, 96, **options)
    x = random_hidden(800, 608, options["dtype"])
    ids, weights = random_routing(800, 3, 8)  # more pairs than list.cu has threads
    matrices = packed_matrices(on_gpu(small), options["dtype"])
    out = run(x.cuda(), *matrices, small.activation, ids.cuda(), weights.cuda(), 16)
    assert_close_enough(out.cpu(), x, small, ids, weights)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        decode,
        wide,
        triton,
        prefill,
        store,
        transformed,
        recent,
        recipe_stores,
        small,
        linear,
        unpacked,
        cuts,
        swiglu,
        experts,
        routers,
        tiles,
    )
}


def main() -> None:
    """Run the parts that are named, or all."""
    torch.manual_seed(0)
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
