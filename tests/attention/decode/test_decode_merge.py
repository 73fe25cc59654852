"""The merge of a decode step, its CUDA source run on the CPU, against float64."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from attention.decode.decode_plans import (
    Share,
    Step,
    inputs_of,
    make_plan,
    on_host,
    random_step,
    read,
    shares,
)
from cuda_on_host import needs_compiler
from halfbyte.attention.decode import cuda
from halfbyte.attention.decode.plan import DecodePlan
from halfbyte.attention.decode.recipe import RecipeVariant

pytestmark = needs_compiler

KERNELS = ("merge_8", "merge_32", "merge_128", "merge_128_ahead", "merge_512")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
STEPS = {
    "one-long": Step([300_000], [1], kv_heads=1),
    "one-part-each": Step([100, 0, 90], [1, 2, 1], multiprocessors=1),
    "nothing-cached": Step([0, 0, 40], [1, 2, 1], head_size=64),
    "ragged": Step([900, 0, 33, 7000, 1], [1, 2, 1, 3, 0], group=3, head_size=64),
    "several-items": Step([4000, 100, 0, 2], [8, 7, 1, 5], group=7, kv_heads=1),
    "many-columns": Step([9000, 300], [2, 1], group=20, kv_heads=1, head_size=256),
    "units-of-many-items": Step([100, 20, 0, 300] * 10, [1] * 40, kv_heads=1, multiprocessors=1),
    "window": Step([5000, 800, 64, 65], [2, 1, 4, 1], group=8, window=130),
    "padded": Step([900, 0, 33], [1, 2, 1], padding=5),
    "padded-sequences": Step([900, 33, 500, 0], [1, 1, 0, 0], group=8, padding=2),
    "fixed-spans": Step([5000, 513, 0], [1, 2, 1], group=4, batch_invariant=True),
}


class Parts(NamedTuple):
    """Partial results of the attention kernel, and their expected merge, by (token, head)."""

    is_one: torch.Tensor
    """Bool `[tokens, heads]`: rows of one part, which the attention kernel has written itself."""
    out: torch.Tensor
    """Float64 `[tokens, heads, head_size_v]`: sums of weighted values."""
    total: torch.Tensor
    """Float64 `[tokens, heads]`: softmax denominators."""


def random_parts(step: Step, plan: DecodePlan, generator: torch.Generator) -> Parts:
    """Fill the rows that the merge reads, and only those, with parts; a quarter of them empty."""
    cols, heads = plan.variant.columns, step.kv_heads * step.group
    partial_out = plan.partial_out.view(-1, step.kv_heads, cols, step.head_size)
    partial_ml = plan.partial_ml.view(-1, step.kv_heads, cols, 2)
    for partial in (partial_out, partial_ml):
        partial.fill_(torch.nan)
    sums = Parts(
        torch.zeros(step.starts[-1], heads, dtype=torch.bool),
        torch.zeros(step.starts[-1], heads, step.head_size, dtype=torch.float64),
        torch.zeros(step.starts[-1], heads, dtype=torch.float64),
    )
    table = read(plan, step.starts[-1])
    found = shares(table)
    number = Counter(share.item for share in found)
    for share in found:
        seq, col_tile = table.item_records[share.item, 1:3].tolist()
        # Columns are numbered by token, then by head of the KV head's group.
        columns = torch.arange(cols) + col_tile * cols
        columns = columns[columns < step.queries[seq] * step.group]
        tokens = step.starts[seq] + columns // step.group
        if number[share.item] == 1:
            for kv_head in range(step.kv_heads):
                sums.is_one[tokens, kv_head * step.group + columns % step.group] = True
            continue
        size = (step.kv_heads, len(columns))
        empty = torch.rand(size, generator=generator) < 0.25
        top = 12 * torch.randn(size, generator=generator)
        # Some maxima differ so much that exp2 of their difference overflows float32.
        top = torch.where(torch.rand(size, generator=generator) < 0.1, 10 * top, top)
        top = torch.where(empty, -torch.inf, top)
        total = torch.where(empty, 0, 0.1 + 50 * torch.rand(size, generator=generator))
        out = torch.randn(*size, step.head_size, generator=generator) * ~empty[..., None]
        row = row_of(share)
        partial_ml[row, :, : len(columns)] = torch.stack([top, total], dim=-1)
        partial_out[row, :, : len(columns)] = out
        weights = total.double() * top.double().exp2()
        for kv_head in range(step.kv_heads):
            at = (tokens, kv_head * step.group + columns % step.group)
            sums.total[at] += weights[kv_head]
            sums.out[at] += weights[kv_head, :, None] * out[kv_head]
    return sums


def row_of(share: Share) -> int:
    """Row of the partial results of a unit's share of a work item, as in `work.cuh`."""
    return share.unit + share.item


def assert_merged(
    step: Step, dtype: torch.dtype, seed: int, with_sinks: bool, with_lse: bool
) -> None:
    """All kernels against the same sums; memory around the output must not change."""
    generator = torch.Generator().manual_seed(seed)
    heads, num_tokens = step.kv_heads * step.group, step.starts[-1]
    sinks = 8 * torch.randn(heads, generator=generator) if with_sinks else None
    if sinks is not None:
        sinks[0] = -torch.inf
    with on_host(step) as launched:
        plan = make_plan(step)
        sums = random_parts(step, plan, generator)
        expected, expected_lse = softmax(sums, sinks)
        results = {}
        for kernel in KERNELS:
            rows = num_tokens + step.padding
            memory = torch.full((rows, heads + 1, step.head_size + 8), torch.nan, dtype=dtype)
            out = memory[:, :heads, : step.head_size]
            lse = torch.full((rows + 1, heads), torch.nan) if with_lse else None
            inputs = inputs_of(
                step,
                query=torch.zeros(rows, heads, step.head_size, dtype=dtype),
                block_tables=torch.zeros(len(step.lengths), 1, dtype=torch.int32),
                sinks=sinks,
                given_out=out,
                lse=lse,
            )
            cuda.run(inputs, replace(plan, merge=kernel))
            assert [name for name, _ in launched[-2:]] == ["decode", kernel]
            rtol = 1.01 * ROUNDING[dtype]
            assert (out[num_tokens:] == 0).all()
            torch.testing.assert_close(
                out[:num_tokens].double(), expected, rtol=rtol, atol=1e-5, equal_nan=True
            )
            assert memory[:, heads:].isnan().all()
            assert memory[..., step.head_size :].isnan().all()
            results[kernel] = out.nan_to_num()
            if lse is not None:
                torch.testing.assert_close(
                    lse[:num_tokens].double(), expected_lse, rtol=1e-6, atol=1e-5, equal_nan=True
                )
                assert lse[-1].isnan().all()
        # Loads that are issued earlier change no order of sums.
        assert torch.equal(results["merge_128"], results["merge_128_ahead"])


def softmax(sums: Parts, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; 0 for rows without keys, NaN for rows that the merge must not write."""
    total = sums.total if sinks is None else sums.total + sinks.double().exp()
    out = torch.where(total[..., None] > 0, sums.out / total[..., None], 0)
    out = out.masked_fill(sums.is_one[..., None], torch.nan)
    return out, total.log().masked_fill(sums.is_one, torch.nan)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_merge_of_edge_cases(step: Step) -> None:
    assert_merged(step, torch.bfloat16, 0, with_sinks=False, with_lse=True)
    assert_merged(step, torch.bfloat16, 1, with_sinks=True, with_lse=True)


def test_merge_of_random_batches() -> None:
    steps = (random_step(seed, max_sequences=20, max_tokens=6000) for seed in range(100))
    # A CTA of the slower kernels takes a row and 32 of its dims, and half a millisecond here.
    small = [s for s in steps if s.starts[-1] * s.group * s.kv_heads * s.head_size <= 32 * 500]
    for seed, step in enumerate(small[:8]):
        assert_merged(step, torch.float16, seed, with_sinks=seed % 2 == 0, with_lse=seed % 3 != 0)


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        (Step([100] * 64, [1] * 64, kv_heads=8), "merge_8"),
        (Step([30_000] * 8, [1] * 8, kv_heads=8), "merge_32"),
        (Step([30_000] * 60, [1] * 60, kv_heads=1), "merge_32"),
        # Not all CTAs are resident at once.
        (Step([30_000] * 60, [1] * 60, kv_heads=1, group=32, head_size=256), "merge_8"),
        (Step([30_000] * 2, [1] * 2, kv_heads=8), "merge_128"),
        (Step([300_000], [1], kv_heads=1), "merge_512"),
        (Step([300_000], [1], kv_heads=1, batch_invariant=True), "merge_128"),
    ],
)
def test_parts_and_rows_decide_the_kernel(step: Step, kernel: str) -> None:
    with on_host(step):
        assert make_plan(step).merge == kernel


def test_recent_tokens_of_one_sequence_may_need_one_unit_more() -> None:
    step = Step([131_008], [1], kv_heads=8)
    with on_host(step):
        plan = make_plan(step, RecipeVariant(recent=64))
        assert len(shares(read(plan, 1))) == 129
    assert plan.merge == "merge_128_ahead"
