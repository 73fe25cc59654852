"""Decode attention: the launcher and its CUDA sources, run on the CPU, against float64."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from attention.cases import Case, assert_close_to_exact, dense, make_case
from attention.decode.decode_plans import Step, alone, on_host
from cuda_on_host import guarded, needs_compiler
from halfbyte.attention.base import AttentionInputs, AttentionPlans
from halfbyte.attention.decode import cuda
from halfbyte.attention.decode.variant import choose_variant
from slow import slow

pytestmark = needs_compiler

NVFP4 = Step([], [], multiprocessors=3)
SINKS = Step([], [], group=8, kv_heads=1, head_size=64, multiprocessors=2)
FP8 = Step([], [], dtype="fp8_e4m3", capability=80, multiprocessors=2)
E5M2 = Step([], [], dtype="fp8_e5m2", group=1, head_size=256, block_size=32, multiprocessors=1)
BF16 = Step([], [], dtype="bfloat16", group=16, kv_heads=1, head_size=64, multiprocessors=1)
MANY_COLUMNS = Step(
    *([3, 17, 330, 0], [3, 2, 6, 1]),
    group=8,
    block_size=48,
    order="NHD",
    window=70,
    capability=80,
    multiprocessors=2,
)
WGMMA = Step([], [], group=32, kv_heads=2, multiprocessors=1)
WGMMA_64 = replace(WGMMA, group=64)
GEMMA = Step([], [], group=12, head_size=256, capability=89, multiprocessors=2)
WGMMA_256 = replace(WGMMA_64, head_size=256)
WIDE_NHD = replace(WGMMA, head_size=64, order="NHD", block_size=48)
WHOLE_PAGES = Step([], [], group=32, kv_heads=1, multiprocessors=1)
WHOLE_PAGES_64 = replace(WHOLE_PAGES, group=8, head_size=64, block_size=64)
WHOLE_PAGES_32_OF_256 = replace(WHOLE_PAGES, head_size=256)
WHOLE_PAGES_256 = replace(WHOLE_PAGES, group=40, head_size=256, block_size=32)
"""Cases of variants of the attention kernel; the C++ compiler runs for each."""

CASES: dict[str, tuple[Step, dict[str, Any]]] = {
    "ragged": (replace(NVFP4, lengths=[1, 40, 77, 0, 300, 64, 129], queries=[1] * 7), {}),
    "units-of-many-items": (
        replace(NVFP4, lengths=[1, 40, 300, 0, 65] * 2, queries=[1] * 10, multiprocessors=1),
        {},
    ),
    "uneven-queries": (
        replace(NVFP4, lengths=[70, 3, 130, 20, 0, 2], queries=[3, 0, 1, 0, 1, 0]),
        {},
    ),
    "units-of-one-tile": (replace(NVFP4, lengths=[192, 320], queries=[1, 1]), {}),
    "window": (
        replace(NVFP4, lengths=[2, 50, 102, 400, 163], queries=[1, 1, 2, 1, 0], window=100),
        {"sinks": True},
    ),
    "window-of-a-billion": (
        replace(NVFP4, lengths=[5, 70, 300], queries=[1, 1, 1], window=2**30),
        {},
    ),
    "window-of-millions-bfloat16": (
        replace(BF16, lengths=[5, 70], queries=[1, 1], window=2**25),
        {},
    ),
    "window-of-one": (replace(NVFP4, lengths=[2, 64, 65], queries=[1, 1, 1], window=1), {}),
    "sinks": (
        replace(SINKS, lengths=[1, 40, 0, 300], queries=[1, 1, 1, 1]),
        {"sinks": True},
    ),
    "batch-invariant": (
        replace(SINKS, lengths=[100, 3, 50, 700, 2], queries=[4, 3, 0, 8, 5], batch_invariant=True),
        {"sinks": True},
    ),
    "fp8": (
        replace(FP8, lengths=[4, 50, 102, 300], queries=[2, 2, 1, 3], window=90),
        {"sinks": True},
    ),
    "e5m2-of-float16": (
        replace(E5M2, lengths=[1, 47, 200], queries=[1, 1, 1]),
        {"query_dtype": torch.float16},
    ),
    "bfloat16": (replace(BF16, lengths=[1, 40, 0, 170], queries=[1] * 4), {}),
    "many-columns": (MANY_COLUMNS, {"sinks": True, "softcap": 3.0}),
    "wgmma": (replace(WGMMA, lengths=[1, 40, 0, 300, 129], queries=[1] * 5), {"sinks": True}),
    "wgmma-nhd": (
        replace(WIDE_NHD, lengths=[3, 140, 300], queries=[1] * 3, window=90),
        {"softcap": 3.0},
    ),
    "wgmma-64-columns": (replace(WGMMA_64, lengths=[1, 140, 300], queries=[1] * 3), {}),
    "whole-pages-32-columns-of-256": (
        replace(WHOLE_PAGES_32_OF_256, lengths=[1, 140, 70], queries=[1] * 3),
        {},
    ),
    "whole-pages": (
        replace(WHOLE_PAGES, lengths=[1, 40, 300, 0, 65] * 2, queries=[1] * 10),
        {"sinks": True},
    ),
    "whole-pages-of-64": (
        replace(WHOLE_PAGES_64, lengths=[40, 163, 400, 5], queries=[3, 4, 4, 5], window=100),
        {},
    ),
    "whole-pages-head-size-256": (
        replace(WHOLE_PAGES_256, lengths=[1, 47, 200, 0], queries=[1] * 4),
        {"query_dtype": torch.float16},
    ),
}

RECIPE: dict[str, Any] = {"transform": {"segment": 64}}
CHANGED: dict[str, tuple[Step, dict[str, Any]]] = {
    "ragged": (replace(NVFP4, lengths=[1, 40, 77, 0, 300, 64, 129], queries=[1] * 7), RECIPE),
    "several-queries-window": (
        replace(NVFP4, lengths=[70, 3, 130, 300, 2], queries=[3, 1, 1, 2, 2], window=66),
        {**RECIPE, "sinks": True},
    ),
    "many-columns-softcap": (MANY_COLUMNS, {**RECIPE, "sinks": True, "softcap": 3.0}),
    "without-first-tokens": (
        replace(SINKS, lengths=[1, 40, 0, 300], queries=[1] * 4),
        {"transform": {"segment": 64, "first_tokens": 0}},
    ),
    "first-tokens-alone": (
        replace(SINKS, lengths=[1, 40, 0, 300], queries=[1] * 4),
        {"transform": {"segment": 64, "center": False, "rotate": False}},
    ),
    "wgmma": (replace(WGMMA, lengths=[1, 40, 0, 300, 129], queries=[1] * 5), RECIPE),
    "wgmma-64-columns": (replace(WGMMA_64, lengths=[1, 140, 300], queries=[1] * 3), RECIPE),
    "wgmma-nhd-softcap": (
        replace(WIDE_NHD, lengths=[3, 140, 300], queries=[1] * 3, window=90),
        {**RECIPE, "softcap": 3.0},
    ),
    "whole-pages-head-size-256": (
        replace(WHOLE_PAGES_256, lengths=[1, 47, 200, 0], queries=[1] * 4),
        RECIPE,
    ),
    "whole-pages-of-64": (
        replace(WHOLE_PAGES_64, lengths=[40, 163, 400, 5], queries=[3, 4, 4, 5], window=100),
        RECIPE,
    ),
    "recent": (
        replace(NVFP4, lengths=[1, 40, 77, 0, 300, 64, 65], queries=[1] * 7),
        {**RECIPE, "recent": 64, "sinks": True},
    ),
    "recent-short-table": (replace(NVFP4, lengths=[5], queries=[1]), {**RECIPE, "recent": 64}),
    "recent-wgmma-short-table": (
        replace(WGMMA, lengths=[5, 9], queries=[1, 1]),
        {**RECIPE, "recent": 64},
    ),
    "queries-before-the-beginning": (
        replace(NVFP4, lengths=[66, 300, 65], queries=[4, 1, 2]),
        {**RECIPE, "recent": 64},
    ),
    "sequences-shorter-than-their-queries": (
        replace(NVFP4, lengths=[2, 300, 1], queries=[4, 1, 3]),
        RECIPE,
    ),
    "recent-alone": (replace(NVFP4, lengths=[1, 40, 77, 300], queries=[1] * 4), {"recent": 64}),
    "recent-several-queries-window": (
        replace(NVFP4, lengths=[70, 3, 130, 300, 2], queries=[3, 1, 1, 2, 2], window=100),
        {**RECIPE, "recent": 64},
    ),
    "recent-more-queries-than-that": (
        replace(
            NVFP4,
            lengths=[300, 300, *[66] * 40, 300, 70],
            queries=[100, 100, *[1] * 40, 100, 1],
            group=1,
            multiprocessors=2,
        ),
        {**RECIPE, "recent": 64},
    ),
    "recent-window-below": (
        replace(NVFP4, lengths=[70, 3, 130, 300, 2], queries=[1] * 5, window=50),
        {**RECIPE, "recent": 64},
    ),
    "recent-wgmma-softcap": (
        replace(WIDE_NHD, lengths=[3, 140, 300, 0], queries=[1] * 4),
        {**RECIPE, "recent": 64, "softcap": 3.0},
    ),
    "interleaved-pairs-of-channels": (
        replace(NVFP4, lengths=[1, 40, 300, 129], queries=[1] * 4),
        {"transform": {"segment": 64, "interleaved": True}, "recent": 64},
    ),
    "wgmma-interleaved-pairs": (
        replace(WGMMA, lengths=[1, 300, 129], queries=[1] * 3),
        {"transform": {"segment": 64, "interleaved": True}, "recent": 64},
    ),
    "more-than-16-segments": (
        replace(NVFP4, lengths=[2500, 70, 1400], queries=[1] * 3, multiprocessors=1),
        {"transform": {"segment": 64}, "recent": 64},
    ),
    "wgmma-more-than-16-segments": (
        replace(WGMMA, lengths=[2300, 140], queries=[1] * 2),
        {"transform": {"segment": 64}},
    ),
    "segments-of-two-tiles": (
        replace(NVFP4, lengths=[300, 700], queries=[1] * 2),
        {"transform": {"segment": 128}, "recent": 100},
    ),
    "coefficients-that-do-not-fit": (
        replace(GEMMA, lengths=[40, 1300, 300], queries=[1] * 3),
        {"transform": {"segment": 64}, "recent": 64},
    ),
    "wgmma-queries-that-do-not-fit": (
        replace(WGMMA_256, lengths=[40, 300], queries=[1] * 2),
        {**RECIPE, "recent": 64},
    ),
    "batch-invariant": (
        replace(NVFP4, lengths=[100, 3, 700, 65], queries=[4, 3, 1, 2], batch_invariant=True),
        {**RECIPE, "recent": 64},
    ),
    "recent-whole-pages": (
        replace(WHOLE_PAGES_256, lengths=[1, 47, 200, 0], queries=[1] * 4),
        {**RECIPE, "recent": 64},
    ),
}
"""K that a recipe changed, and recent tokens in 16 bits."""

BATCHES = (
    *("ragged", "uneven-queries", "batch-invariant", "fp8", "bfloat16", "many-columns"),
    *("wgmma", "wgmma-nhd", "whole-pages", "whole-pages-of-64", "whole-pages-head-size-256"),
)
"""Cases that random ones are derived from, with the same kernels."""


STORED = (
    *(
        "units-of-many-items",
        "units-of-one-tile",
        "uneven-queries",
        "window",
        "batch-invariant",
        "fp8",
    ),
    *("bfloat16", "many-columns", "wgmma", "several-queries-window", "recent", "recent-alone"),
    *("recent-several-queries-window", "recent-more-queries-than-that", "more-than-16-segments"),
    "coefficients-that-do-not-fit",
)
"""Cases that are computed while their tokens are stored."""


class Expected(NamedTuple):
    """Results in float64, `[tokens, heads, ...]`."""

    out: torch.Tensor
    sizes: torch.Tensor
    """As `out`, computed with |V|: the scale of rounding errors."""
    lse: torch.Tensor


def case_of(step: Step, **options: Any) -> Case:
    """The step's tokens on packed pages, with NaN in tokens that no query attends to."""
    if step.window is not None:
        options["sliding_window"] = step.window
    case = make_case(
        k_dtype=step.dtype,
        head_size=step.head_size,
        kv_heads=step.kv_heads,
        group=step.group,
        block_size=step.block_size,
        order=step.order,
        query_lens=tuple(step.queries),
        seq_lens=tuple(step.lengths),
        **options,
    )
    if step.window is not None:
        for length, queries, slots in zip(step.lengths, step.queries, case.slots, strict=True):
            forget(case, case.pages, slots[: max(0, length - queries - step.window + 1)])
    return case


def forget(case: Case, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Replace tokens of some pages by NaN."""
    at = (slots // case.layout.block_size, slots % case.layout.block_size)
    for view in case.layout.views(pages):
        if view is not None:
            view[at] = 0xFF if view.dtype == torch.uint8 else torch.nan


def only(case: Case, seq: int) -> Case:
    """The case with one of its sequences only."""
    first, last = sum(case.query_lens[:seq]), sum(case.query_lens[: seq + 1])
    options = dict(case.options)
    if (recent := options.get("recent")) is not None:
        options["recent"] = recent._replace(
            entries=recent.entries[seq : seq + 1],
            key=recent.key[first:last],
            value=recent.value[first:last],
        )
    return replace(
        case,
        options=options,
        query=case.query[first:last],
        query_lens=[case.query_lens[seq]],
        seq_lens=[case.seq_lens[seq]],
        block_tables=case.block_tables[seq : seq + 1],
        slots=[case.slots[seq]],
    )


def attend(step: Step, case: Case, stores: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by the launcher; memory after its tensors is unmapped.

    Args:
        stores: whether it stores the step's tokens first, which are not in the pages before the
            attention kernel has waited for that.
    """

    def moved(x: torch.Tensor) -> torch.Tensor:
        return guarded(x.shape, x.dtype).copy_(x)

    def empty(size: int | tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        return guarded((size,) if isinstance(size, int) else size, dtype)

    tokens, heads, _ = case.query.shape
    memory = guarded((tokens, heads + 1, case.layout.head_size_v + 8), case.query.dtype)
    out = memory[:, :heads, : case.layout.head_size_v]
    lse = guarded(case.query.shape[:2], torch.float32)
    options: dict[str, Any] = dict.fromkeys(("sliding_window", "sinks", "softcap"))
    options |= case.arguments()
    options |= {side: torch.tensor(options[side]) for side in ("k_scale", "v_scale")}
    pages, late = moved(case.pages), None
    if stores:
        before = case.pages.clone()
        for length, queries, slots in zip(case.seq_lens, case.query_lens, case.slots, strict=True):
            forget(case, before, slots[max(0, length - queries) :])
        late = pages, before
    inputs = AttentionInputs(
        query=moved(case.query),
        pages=pages,
        batch_invariant=step.batch_invariant,
        given_out=out,
        lse=lse,
        plans=AttentionPlans(),
        **options | {"block_tables": moved(case.block_tables)},
    )
    with (
        on_host(step, attention=True, late=late) as launched,
        patch.object(torch, "empty", empty),
    ):
        cuda.run(inputs, store=(lambda: launched.append(("store", None))) if stores else None)
    if stores:
        assert [name for name, _ in launched][:3] == ["plan_work", "store", "decode"]
    assert memory[:, heads:].isnan().all()
    assert memory[..., case.layout.head_size_v :].isnan().all()
    return out, lse


def expected(case: Case) -> Expected:
    """By plain masked softmax on the dequantized cache."""
    parts: list[tuple[torch.Tensor, ...]] = []
    begins = torch.tensor([0, *case.query_lens]).cumsum(0).tolist()
    scale = case.arguments()["scale"]
    for (begin, end), length, slots in zip(
        pairwise(begins), case.seq_lens, case.slots, strict=True
    ):
        options = dict(case.options)
        options.pop("transform", None)
        if (recent := options.pop("recent", None)) is not None:
            own_key, own = case.exact(len(parts))
            options["recent"] = (own_key, torch.cat([own, own.abs()], dim=-1), recent.tokens)
        key, value = case.read(slots, end - begin)
        values = torch.cat([value, value.abs()], dim=-1)
        query = case.query[begin:end]
        out, lse = dense(query, key, values, length, scale, torch.float64, **options)
        parts.append((*out.chunk(2, dim=-1), lse))
    return Expected(*map(torch.cat, zip(*parts, strict=True)))


def assert_attention(out: torch.Tensor, lse: torch.Tensor, case: Case) -> None:
    """Probabilities enter the matmul in 16 bits, with scales of nvfp4 perhaps rounded twice."""
    wanted = expected(case)
    v_dtype = case.layout.v_dtype
    operand = torch.float16 if v_dtype.is_quantized else v_dtype.storage_dtype
    roundings = 2 if v_dtype.is_nvfp4 else 1
    bound = torch.finfo(out.dtype).eps / 2 * wanted.out.abs()
    bound += torch.finfo(operand).eps / 2 * roundings * wanted.sizes + 1e-7
    assert out.isfinite().all()
    worst = float(((out.double() - wanted.out).abs() / bound).max())
    assert worst <= 1, f"{worst:.2f} times the error that roundings may make"
    torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    step, options = CASES[name]
    case = case_of(step, **options)
    assert_attention(*attend(step, case), case)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *((name, 1) for name in CHANGED),
        *((name, -40) if name in {"ragged", "wgmma"} else slow(name, -40) for name in CHANGED),
    ],
)
def test_attention_to_k_that_a_recipe_changed(name: str, factor: int) -> None:
    step, options = CHANGED[name]
    case = case_of(step, **options)
    case.query.mul_(factor)
    out, lse = attend(step, case)
    assert_close_to_exact(out, case)
    torch.testing.assert_close(lse.double(), expected(case).lse, rtol=1e-3, atol=0.05 * abs(factor))


@pytest.mark.parametrize("name", STORED)
def test_reads_no_token_that_is_still_being_stored(name: str) -> None:
    step, options = (CASES | CHANGED)[name]
    step = replace(step, capability=90)  # the first on which launches overlap
    case = case_of(step, **options)
    for x, y in zip(attend(step, case, stores=True), attend(step, case), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("base", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_a_prefix_that_another_sequence_of_the_step_stores(base: Step) -> None:
    """A prefix cache gives a prompt's blocks to others before they are filled."""
    step = replace(base, lengths=[97] * 16, queries=[97, *[1] * 15], capability=90, group=1)
    case = case_of(step)
    shared = 96 // step.block_size
    case.block_tables[1:, :shared] = case.block_tables[:1, :shared]
    for x, y in zip(attend(step, case, stores=True), attend(step, case), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", BATCHES)
def test_random_batches(name: str) -> None:
    step, options = CASES[name]
    rng = Random(name)
    for seed in range(6):
        # The mean number of queries selects the variant: keep it.
        queries = rng.sample(step.queries, len(step.queries))
        lengths = [rng.choice((0, 1, rng.randint(2, 90), rng.randint(2, 600))) for _ in queries]
        batch = replace(
            step,
            queries=queries,
            lengths=lengths,
            window=rng.choice((None, 1, rng.randint(2, 200))),
            multiprocessors=rng.randint(1, 4),
        )
        case = case_of(batch, **options, seed=seed)
        assert_attention(*attend(batch, case), case)


@pytest.mark.parametrize("name", ["ragged", "sinks", "fp8", "bfloat16", "wgmma", "whole-pages"])
def test_large_queries(name: str) -> None:
    """Large logits: the max grows, and sums are rescaled, in every tile."""
    step, options = CASES[name]
    case = case_of(step, **options)
    case.query.mul_(-40)
    assert_attention(*attend(step, case), case)


@pytest.mark.parametrize("name", ["ragged", "sinks", "fp8", "bfloat16", "wgmma", "whole-pages"])
@pytest.mark.parametrize("factor", [2.0**-90, -(2.0**60)])
def test_queries_of_any_size(name: str, factor: float) -> None:
    """A power of two, or a sign, may stand in the queries or in the softmax's scale."""
    step, options = CASES[name]
    case = case_of(step, **options)
    scale = step.head_size**-0.5 / factor
    scaled = replace(case, query=case.query * factor, options={**case.options, "scale": scale})
    for x, y in zip(attend(step, scaled), attend(step, case), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "seq", "position"),
    [("units-of-many-items", 2, 299), ("many-columns", 2, 321), ("whole-pages", 2, 299)],
)
def test_nan_scales_show(name: str, seq: int, position: int) -> None:
    """NaN in the first 16 dims of the heads and queries that read the block, and nowhere else."""
    step, options = CASES[name]
    case = case_of(step, **options)
    page, token = divmod(int(case.slots[seq][position]), step.block_size)
    scales = case.layout.views(case.pages).v_scale
    assert scales is not None
    scales[page, token, 0, 0] = 0x7F
    out, lse = attend(step, case)
    wanted = torch.zeros(out.shape, dtype=torch.bool)
    wanted[step.starts[seq] : step.starts[seq + 1], : step.group, :16] = True
    assert torch.equal(out.isnan(), wanted)
    assert not lse.isnan().any()


@pytest.mark.parametrize("recipe", [False, True])
def test_rows_do_not_depend_on_the_batch(recipe: bool) -> None:
    step, options = (CHANGED if recipe else CASES)["batch-invariant"]
    case = case_of(step, **options)
    together = attend(step, case)
    for seq in (0, 3):
        rows = slice(step.starts[seq], step.starts[seq + 1])
        by_itself = attend(replace(alone(step, seq), multiprocessors=1), only(case, seq))
        for x, y in zip(by_itself, together, strict=True):
            assert torch.equal(x, y[rows])


def test_cases_cover_these_variants() -> None:
    variants, wgmma = set(), set()
    for step, _ in CASES.values():
        mean = step.starts[-1] / len(step.lengths)
        args = (step.layout, step.group, mean, step.batch_invariant, step.capability)
        variant = choose_variant(*args)
        assert variant is not None
        if variant.wgmma:
            wgmma.add((variant.tile, variant.n_tiles, variant.whole_pages))
        else:
            variants.add((variant.duplicate, variant.n_tiles, variant.q_shared))
    assert variants == {(True, 1, False), (False, 1, False), (False, 2, False), (False, 4, True)}
    assert wgmma == {(128, 4, False), (128, 8, False), (128, 4, True), (64, 8, True)}
