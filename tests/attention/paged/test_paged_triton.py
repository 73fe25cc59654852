"""The Triton attention kernel in the interpreter on a CPU, and its selection."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from attention.cases import TRANSFORM_CASES, Case, assert_close_to_exact, make_case
from attention.cases import config as attention_config
from halfbyte.attention import ATTENTION_BACKENDS
from halfbyte.attention.base import AttentionConfig, AttentionInputs, AttentionPlans
from halfbyte.attention.paged.plan import PagedPlan, Tiles
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES

pytest.importorskip("triton")

from slow import CAPABILITIES, one_in, slow
from triton_interpreter import interpreted

# Small tiles, so that short sequences have several of them; keys of a row in one split, in
# three, or in splits of 32.
TILES = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=2)
WHOLE = PagedPlan(TILES, num_splits=1, split_length=0, tokens_per_launch=1000)
SPLIT = PagedPlan(TILES, num_splits=3, split_length=0, tokens_per_launch=1000)
FIXED = PagedPlan(TILES, num_splits=3, split_length=32, tokens_per_launch=1000)
PLANS = {"whole": WHOLE, "split": SPLIT, "fixed-splits": FIXED}
SMALL: dict[str, Any] = {"query_lens": (1, 5, 1), "seq_lens": (1, 40, 77)}


def interpret(
    case: Case,
    plan: PagedPlan | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    **changes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by the interpreter; float32 instead of bfloat16, to which it cannot round."""
    run = interpreted("halfbyte.attention.paged.launcher").run
    arguments = {"query": case.query, "pages": case.pages, **case.arguments(), **changes}
    query = arguments["query"]
    dtype = torch.float32 if query.dtype == torch.bfloat16 else query.dtype
    if out is None:
        out = torch.empty(*query.shape[:2], case.layout.head_size_v, dtype=dtype)
    defaults = {"sliding_window": None, "sinks": None, "softcap": None}
    inputs = AttentionInputs(
        **{**defaults, **arguments},
        batch_invariant=batch_invariant,
        given_out=out,
        lse=torch.empty(query.shape[:2]),
        plans=AttentionPlans(),
    )
    run(inputs, plan)
    assert inputs.lse is not None
    return inputs.out, inputs.lse


def assert_exact(out: torch.Tensor, lse: torch.Tensor, case: Case, tolerance: float = 2e-5) -> None:
    exact, exact_lse = case.expected()
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def every_format(query_dtype: torch.dtype, plan: str, *not_slow: str) -> list[Any]:
    """Parameters for all formats: queries in 16 bits differ in a few lines, whatever the format."""
    cases = [(dtype, query_dtype, plan) for dtype in KERNEL_DTYPES]
    return [slow(*case) if not_slow and case[0] not in not_slow else case for case in cases]


@pytest.mark.parametrize(
    ("dtype", "query_dtype", "plan"),
    [
        *every_format(torch.float32, "whole"),
        *every_format(torch.float16, "split", "nvfp4", "fp8_e5m2"),
        *every_format(torch.bfloat16, "fixed-splits", "nvfp4_4over6", "mxfp4"),
    ],
    ids=str,
)
def test_attend_every_format(dtype: str, query_dtype: torch.dtype, plan: str) -> None:
    case = make_case(k_dtype=dtype, query_dtype=query_dtype, kv_heads=1, **SMALL)
    out, lse = interpret(case, PLANS[plan])
    assert_close_to_exact(out, case)
    if query_dtype == torch.float32:
        assert_exact(out, lse, case)


_TAKE_LONG = ("several-queries", "long", "d96", "mqa-32", "page-48", "float32", "fp8-v")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *one_in(
            9,
            (
                slow(name, plan) if name in _TAKE_LONG else (name, plan)
                for name, plan in zip(TRANSFORM_CASES, cycle(("whole", "split")), strict=False)
                if name != "prefill"  # takes half a minute
            ),
        ),
        ("d128", "tile-of-two-segments"),
        slow("window", "split"),
        ("sinks-softcap", "fixed-splits"),
    ],
)
def test_attend_to_k_that_a_recipe_changed(name: str, plan: str) -> None:
    case = make_case(**{**TRANSFORM_CASES[name], "query_dtype": torch.float32})
    plans = {
        **PLANS,
        "fixed-splits": replace(FIXED, num_splits=10),
        "tile-of-two-segments": replace(SPLIT, tiles=replace(TILES, block_n=32)),
    }
    assert_exact(*interpret(case, plans[plan]), case)


@pytest.mark.parametrize("query_dtype", [slow(torch.float16), torch.bfloat16], ids=str)
def test_attend_to_k_that_a_recipe_changed_in_16_bits(query_dtype: torch.dtype) -> None:
    case = make_case(**{**TRANSFORM_CASES["d128"], "query_dtype": query_dtype})
    assert_close_to_exact(interpret(case, SPLIT)[0], case)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 9},
        {"sliding_window": 1},
        {"sliding_window": 1000, "sinks": True},
        {"softcap": 2.0},
        {"sliding_window": 20, "sinks": True, "softcap": 3.0},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("plan", PLANS)
def test_attend_options(options: dict[str, Any], plan: str) -> None:
    case = make_case(query_dtype=torch.float32, kv_heads=1, **SMALL, **options)
    assert_exact(*interpret(case, PLANS[plan]), case)


@pytest.mark.parametrize(
    "shape",
    one_in(
        4,
        [
            {"head_size": 16},
            {"head_size": 32, "k_dtype": "mxfp4", "head_size_v": 64},
            {"head_size": 80},
            {"head_size": 96, "k_dtype": "fp8", "head_size_v": 80},
            {"head_size": 256, "group": 1},
            {"head_size": 512, "head_size_v": 16, "group": 2},
            {"k_dtype": "fp8", "v_dtype": "nvfp4", "group": 3},
            {"k_dtype": "nvfp4", "v_dtype": "bfloat16", "order": "NHD", "kv_heads": 3},
            {"k_dtype": "float16", "v_dtype": "fp4_block16", "head_size_v": 128, "order": "NHD"},
            {"k_dtype": "float32", "v_dtype": "fp8_e5m2"},
            {"v_scale_layout": "sm100", "head_size_v": 128},
            {"group": 16, "block_size": 32},
            {"group": 20, "query_lens": (1, 2), "seq_lens": (5, 40)},
            {"block_size": 48},
            {"block_size": 1, "k_dtype": "fp8"},
            {"block_size": 8},
        ],
    ),
    ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items()),
)
def test_attend_shapes(shape: dict[str, Any]) -> None:
    case = make_case(query_dtype=torch.float32, **{"kv_heads": 1, **SMALL, **shape})
    assert_exact(*interpret(case, SPLIT), case)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ((0, 2, 0, 0, 1, 0), (5, 2, 0, 7, 33, 0)),
        ((1, 1, 1), (0, 3, 0)),
        ((3, 20), (1, 10)),
        ((1,) * 9, tuple(range(9))),
    ],
    ids=["no-queries", "empty-sequences", "more-queries-than-tokens", "one-each"],
)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_attend_edges(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], sinks: bool) -> None:
    case = make_case(
        query_lens=query_lens,
        seq_lens=seq_lens,
        query_dtype=torch.float32,
        kv_heads=1,
        sinks=sinks,
    )
    for plan in (WHOLE, FIXED):
        assert_exact(*interpret(case, plan), case)


def test_attend_without_tokens_does_nothing() -> None:
    case = make_case(query_lens=(), seq_lens=())
    assert interpret(case)[0].shape == (0, 8, 64)


def test_attend_prompt_after_a_prefix_in_its_own_plan() -> None:
    case = make_case(
        query_lens=(37, 1, 70),
        seq_lens=(37, 30, 90),
        query_dtype=torch.float32,
        k_dtype="fp8",
        kv_heads=1,
        sliding_window=50,
    )
    assert_exact(*interpret(case), case)
    assert_exact(*interpret(case, batch_invariant=True), case)


def test_attend_long_inputs_in_several_launches() -> None:
    case = make_case(query_lens=(9, 1, 8), seq_lens=(30, 40, 8), kv_heads=1)
    once = interpret(case, SPLIT)
    several = interpret(case, PagedPlan(TILES, 3, 0, tokens_per_launch=4))
    torch.testing.assert_close(several, once, rtol=1e-6, atol=1e-6)


def test_attend_row_is_bitwise_the_same_in_any_batch(rows_alike: None) -> None:
    case = make_case(query_lens=(3, 1, 6), seq_lens=(50, 77, 20), sliding_window=40, kv_heads=1)
    together, together_lse = interpret(case, FIXED)
    arguments = case.arguments()
    begin = 0
    for i, n in enumerate(case.query_lens):
        rows = slice(begin, begin + n)
        for split_count, per_launch in ((3, 1000), (5, 2)):
            alone, lse = interpret(
                case,
                PagedPlan(TILES, split_count, 32, per_launch),
                query=case.query[rows],
                query_start_loc=torch.tensor([0, n], dtype=torch.int32),
                seq_lens=arguments["seq_lens"][i : i + 1],
                block_tables=case.block_tables[i : i + 1],
            )
            assert torch.equal(alone, together[rows])
            assert torch.equal(lse, together_lse[rows])
        begin += n


def test_attend_reads_no_page_before_the_window() -> None:
    case = make_case(
        query_lens=(1, 2), seq_lens=(100, 80), sliding_window=20, kv_heads=1, block_size=8
    )
    expected = interpret(case, SPLIT)
    # Those pages may have been reused by other sequences. The second sequence's keys begin
    # at 59, in page 7; the tile that holds them begins in page 6.
    case.block_tables[0, :10] = 2**30
    case.block_tables[1, :7] = 2**30
    for got, want in zip(interpret(case, SPLIT), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4", "fp8", "fp8_e5m2"])
def test_attend_marks_nan_and_only_where_it_is(dtype: str) -> None:
    case = make_case(k_dtype=dtype, query_lens=(1, 1), seq_lens=(40, 40))
    page, offset = int(case.slots[1][3]) // 16, int(case.slots[1][3]) % 16
    views = case.layout.views(case.pages)
    marked = views.v_data if views.v_scale is None else views.v_scale
    marked[page, offset, 0, 0] = 0xFF
    width = 1 if views.v_scale is None else case.layout.v_dtype.scale_block_size
    for plan in (WHOLE, SPLIT):
        out, _ = interpret(case, plan)
        assert not out[0].isnan().any()
        assert out[1, :4, :width].isnan().all()
        assert not out[1, :4, width:].isnan().any()
        assert not out[1, 4:].isnan().any()


def test_attend_scales_as_tensors_of_any_shape() -> None:
    case = make_case(**SMALL)
    expected, _ = interpret(case, WHOLE)
    for k_scale, v_scale in (
        (torch.tensor(case.k_scale), torch.tensor([case.v_scale])),
        (torch.tensor(case.k_scale), case.v_scale),
    ):
        out, _ = interpret(case, WHOLE, k_scale=k_scale, v_scale=v_scale)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exponent", [100, 20, -20, -100])
def test_attend_queries_of_any_magnitude(exponent: int) -> None:
    case = make_case(**SMALL)
    expected, expected_lse = interpret(case, WHOLE)
    case.query *= 2.0**exponent
    out, lse = interpret(case, WHOLE, scale=case.arguments()["scale"] * 2.0**-exponent)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_attend_views_of_queries_and_output() -> None:
    case = make_case(query_dtype=torch.float32, query_lens=(5, 2), seq_lens=(9, 20))
    expected, _ = interpret(case, WHOLE)
    wide = torch.randn(7, 12, 64)
    wide[:, 2:10] = case.query
    assert torch.equal(interpret(case, WHOLE, query=wide[:, 2:10])[0], expected)
    spread = torch.zeros(7, 8, 64, 2)
    spread[..., 0] = case.query
    assert torch.equal(interpret(case, WHOLE, query=spread[..., 0])[0], expected)
    for out in (torch.empty(64, 8, 7).permute(2, 1, 0), torch.empty(8, 7, 100)[..., 4:68].mT.mT):
        out = out.transpose(0, 1) if out.shape[0] == 8 else out
        interpret(case, SPLIT, query=case.query, out=out)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_attend_refuses_misaligned_pages() -> None:
    case = make_case(k_dtype="bfloat16", **SMALL)
    odd = torch.zeros(case.pages.shape[0], case.pages.shape[1] + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 2 bytes"):
        interpret(case, WHOLE, pages=odd)


def config(**changes: Any) -> AttentionConfig:
    layout = PageLayout("bfloat16", "bfloat16", 128, None, 8, 16)
    return attention_config(**{"layout": layout, "num_tokens": 4096, "num_seqs": 2, **changes})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_selection_takes_triton_rather_than_the_reference(capability: int) -> None:
    work = config(compute_capability=capability)
    usable = [
        verdict.name
        for verdict in ATTENTION_BACKENDS.explain(work, compute_capability=capability)
        if verdict.usable
    ]
    assert usable.index("triton") < usable.index("reference")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": PageLayout("bfloat16", "bfloat16", 72, None, 8, 16)}, "multiples of 16"),
        ({"layout": PageLayout("nvfp4", "nvfp4", 576, 512, 1, 16)}, "up to 512, not 576"),
        ({"query_dtype": torch.float64}, "not torch.float64"),
        ({"device_type": "cpu"}, "not on a GPU"),
    ],
    ids=["head-size-72", "head-size-576", "float64", "cpu-tensors"],
)
def test_selection_says_why_not_triton(changes: dict[str, Any], reason: str) -> None:
    usable, why = ATTENTION_BACKENDS.get("triton").can_implement(config(**changes))
    assert not usable
    assert reason in why


@pytest.mark.parametrize(("capability", "reason"), [(0, "needs an NVIDIA GPU"), (75, "8.0")])
def test_machines_without_the_kernel(capability: int, reason: str) -> None:
    assert reason in ATTENTION_BACKENDS.get("triton").is_supported(capability)[1]
