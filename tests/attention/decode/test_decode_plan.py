"""The plan of a decode step, by its CUDA source run on the CPU: complete, disjoint and balanced."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from attention.decode.decode_plans import (
    Share,
    Step,
    Table,
    alone,
    make_plan,
    on_host,
    random_step,
    read,
    shares,
)
from cuda_on_host import needs_compiler
from halfbyte.attention.decode import plan as plans
from halfbyte.attention.decode.plan import DecodePlan
from halfbyte.attention.decode.recipe import NO_RECIPE, RecipeVariant
from halfbyte.attention.decode.variant import stage_bytes

pytestmark = needs_compiler

UNTOUCHED = -77
RECENT = RecipeVariant(recent=64)
EDGES = {
    "one-token": Step([1], [1]),
    "nothing-cached": Step([0, 0, 0], [1, 2, 1]),
    "no-queries": Step([50, 70], [0, 0]),
    "empty-at-both-ends": Step([0, 5000, 0, 0, 300, 0], [1, 1, 0, 2, 1, 1]),
    "shorter-than-its-queries": Step([3, 700], [8, 8], window=2),
    "one-unit": Step([900, 20, 0, 77], [1, 2, 1, 1], kv_heads=8, multiprocessors=1),
    "one-long": Step([300_000, *[1] * 63], [1] * 64),
    "same-lengths": Step([8192] * 64, [1] * 64, kv_heads=8),
    "more-items-than-units": Step([100] * 300, [8] * 300, kv_heads=8, multiprocessors=3),
    "last-cached": Step(list(range(1024)), [1] * 1024),
    "more-than-cached": Step([*range(1023), 40_000, 70_000, *range(500), 0], [1] * 1526, group=8),
    "more-than-two-blocks": Step([i * 37 % 900 for i in range(2100)], [i % 3 for i in range(2100)]),
    "window-of-one": Step([1, 2, 64, 65, 5000], [1, 1, 3, 8, 4], window=1),
    "window-longer-than-all": Step([10, 2000, 999], [1, 2, 8], window=4000),
    "many-columns": Step([4000, 100, 0], [8, 7, 1], group=40),
    "fixed-spans": Step([513, 512, 511, 0, 9000, 1], [1, 2, 1, 1, 8, 1], batch_invariant=True),
}


class Work(NamedTuple):
    """A sequence's work, computed from the definition of attention."""

    tiles: range
    col_tiles: int


def work_of(step: Step, seq: int, tile: int, columns: int, least: int = 0) -> Work:
    """Tiles that any query token attends to, at least so many, and blocks of query columns."""
    length, queries = step.lengths[seq], step.queries[seq]
    seen: set[int] = set()
    for position in range(length - queries, length):
        oldest = 0 if step.window is None else max(0, position - step.window + 1)
        if position >= 0:
            seen |= {oldest // tile, position // tile}
    tiles = range(min(seen), max(seen) + 1) if seen else range(0)
    if queries and len(tiles) < least:
        tiles = range(tiles.start, tiles.start + least)
    return Work(tiles, -(-queries * step.group // columns))


def assert_records(step: Step, table: Table, works: list[Work]) -> None:
    """Work items are in order on the line, with correct fields of their sequences."""
    items = table.item_records[: table.items]
    wanted = [(seq, c) for seq, work in enumerate(works) for c in range(work.col_tiles)]
    assert items[:, 1:3].tolist() == [list(pair) for pair in wanted]
    for (seq, _), record in zip(wanted, items.tolist(), strict=True):
        tiles = works[seq].tiles
        assert record[4:] == [len(tiles), step.lengths[seq], step.starts[seq], step.queries[seq]]
        assert record[3] == tiles.start or not tiles
    assert all(a[0] <= b[0] for a, b in pairwise(items))
    first_pieces = np.cumsum([0, *(work.col_tiles for work in works)])[:-1]
    assert table.token_records[:, 0].tolist() == np.repeat(first_pieces, step.queries).tolist()
    for first, begin, cost, tiles, q_begin in table.token_records[:, :5].tolist():
        same = items[items[:, 1] == items[first, 1]]
        assert same[:, 0].tolist() == [begin + i * cost for i in range(len(same))]
        assert (same[:, 4] == tiles).all()
        assert (same[:, 6] == q_begin).all()
    for record in table.unit_records[: table.units]:
        assert record[:8].tolist() == items[record[8]].tolist()


def assert_shares(step: Step, plan: DecodePlan, table: Table, works: list[Work]) -> None:
    """Every tile of every item belongs to one unit; results have a row each, side by side."""
    found = shares(table)
    done = sorted(
        (*table.item_records[share.item, 1:3].tolist(), tile)
        for share in found
        for tile in range(share.first, share.stop)
    )
    assert done == [
        (seq, c, tile)
        for seq, w in enumerate(works)
        for c in range(w.col_tiles)
        for tile in w.tiles
    ]
    # No unit is empty.
    assert {share.unit for share in found} == set(range(table.units))
    rows = [share.unit + share.item for share in found]
    assert len(set(rows)) == len(rows)
    assert max(rows, default=0) < len(plan.partial_ml) // (step.kv_heads * plan.variant.columns)
    for a, b in pairwise(sorted(found, key=lambda share: (share.item, share.unit))):
        assert a.item != b.item or (b.unit == a.unit + 1 and a.stop == b.first)
    if table.aligned:
        assert len({share.unit for share in found}) == len(found), "a unit has two items"
    for unit, loads in groups(found).items():
        assert sum(share.stop - share.first for share in loads) <= table.span, unit


def groups(found: list[Share]) -> dict[int, list[Share]]:
    by_unit: dict[int, list[Share]] = {}
    for share in found:
        by_unit.setdefault(share.unit, []).append(share)
    return by_unit


def smallest_span(
    least: int, units: Callable[[int], int], max_units: int, longest: int
) -> int | None:
    """The smallest span of at least `least` with at most this many units."""
    spans = range(least, max(least, longest) + 1)
    return next((span for span in spans if units(span) <= max_units), None)


def expected_span(
    works: list[Work], tile: int, max_units: int, recent: int
) -> tuple[int, int, bool]:
    """Span, lead, and whether chunks are aligned, where these are as fast as the continuous layout.

    Chunks have at least 128 tokens. Starting a work item costs as much as 64 tokens, which counts
    in the continuous layout, and so do its recent tokens, as `recent` tiles: there a unit may start
    one work item more. Chunks of up to eight tiles are not made shorter for recent tokens.
    """
    least, overhead = max(1, 128 // tile), max(1, 64 // tile)
    costs = np.array([(len(w.tiles), w.col_tiles) for w in works if w.tiles], int).reshape(-1, 2)
    tiles, items = costs.T

    def lead(span: int) -> int:
        return min(recent, span - 1) if span > 8 else 0

    line = int(((tiles + overhead + recent) * items).sum())
    whole = max(tiles, default=1) + recent
    anywhere = -(-line // max_units)
    chunks = smallest_span(
        max(least, -(-int((tiles * items).sum()) // max_units)),
        lambda span: int((-(-(tiles + lead(span)) // span) * items).sum()),
        max_units,
        max(whole, 9),
    )
    anywhere = max(least, anywhere)
    if chunks is not None and chunks + recent - lead(chunks) <= anywhere + overhead + recent:
        return chunks, lead(chunks), True
    return anywhere, overhead + recent, False


def make_guarded_plan(step: Step, recipe: RecipeVariant) -> tuple[DecodePlan, torch.Tensor, int]:
    """The plan, memory that begins with its data and goes on `UNTOUCHED`, and `max_units`."""
    guarded: list[torch.Tensor] = []

    def empty(size: int | tuple[int, int], **options: object) -> torch.Tensor:
        if isinstance(size, int):
            guarded.append(torch.full((size + 4096,), UNTOUCHED, dtype=torch.int32))
            return guarded[0][:size]
        return torch.zeros(1).expand(*size)  # partial results: only their number counts here

    with pytest.MonkeyPatch.context() as patch, on_host(step) as launched:
        patch.setattr(torch, "empty", empty)
        patch.setattr(plans, "_MAX_PARTIAL_BYTES", 2**60)
        plan = make_plan(step, recipe)
    assert [name for name, _ in launched] == ["plan_work"]
    return plan, guarded[0], launched[0][1].max_units


def assert_planned(step: Step, recipe: RecipeVariant = NO_RECIPE) -> Table:
    num_tokens = step.starts[-1]
    plan, memory, max_units = make_guarded_plan(step, recipe)
    table = read(plan, num_tokens)
    tile, columns = plan.variant.tile, plan.variant.columns
    least = int(recipe.recent > 0)
    works = [work_of(step, seq, tile, columns, least) for seq in range(len(step.lengths))]

    assert table.items == sum(work.col_tiles for work in works)
    assert table.units <= max_units
    assert (memory[len(plan.data) :] == UNTOUCHED).all()
    assert (memory[4 + 8 * num_tokens : plan.view.units_offset] == UNTOUCHED).all()
    assert (table.unit_records[table.units :] == UNTOUCHED).all()
    assert (table.item_records[table.items :] == UNTOUCHED).all()
    fixed = (512 // tile, 0, True)
    # Bytes of recent tokens in 16 bits, over those of a tile.
    recent = round(4 * recipe.recent * step.head_size / stage_bytes(step.layout, tile))
    expected = fixed if step.batch_invariant else expected_span(works, tile, max_units, recent)
    assert (table.span, table.lead, table.aligned) == expected
    assert_records(step, table, works)
    assert_shares(step, plan, table, works)
    return table


@pytest.mark.parametrize("step", EDGES.values(), ids=EDGES)
def test_plan_of_edge_cases(step: Step) -> None:
    for recipe in (NO_RECIPE, RECENT):
        assert_planned(step, recipe)
        assert_planned(replace(step, batch_invariant=True), recipe)


@pytest.mark.parametrize("seed", range(12))
def test_plan_of_random_batches(seed: int) -> None:
    for i in range(20):
        assert_planned(random_step(100 * seed + i), RECENT if i % 2 else NO_RECIPE)


def test_both_orders_of_the_line_are_used() -> None:
    assert assert_planned(EDGES["same-lengths"])[2:4] == (0, True)
    assert assert_planned(EDGES["more-items-than-units"])[2:4] == (1, False)


def test_units_with_recent_tokens_have_fewer_tiles() -> None:
    """64 tokens of 512 bytes are as much as four tiles of 64 tokens: 62 and 66 tiles of 128."""
    table = assert_planned(EDGES["same-lengths"], RECENT)
    assert (table.span, table.lead, table.aligned) == (66, 4, True)
    assert [share.stop - share.first for share in shares(table)] == [62, 66] * 64


def test_fixed_spans_cut_a_sequence_alike_in_every_batch() -> None:
    def cuts(step: Step, seq: int) -> list[tuple[int, int, int]]:
        table = assert_planned(step)
        records = table.item_records[:, 1:3].tolist()
        found = ((records[share.item], share.first, share.stop) for share in shares(table))
        return [(c, first, stop) for (s, c), first, stop in found if s == seq]

    step = EDGES["fixed-spans"]
    for seq in range(len(step.lengths)):
        assert cuts(step, seq) == cuts(alone(step, seq), 0)
