"""`SequenceTables`, one operation at a time; their interplay is in the stateful test."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from halfbyte.kvcache import (
    NULL_PAGE,
    FullAttentionSpec,
    OutOfPagesError,
    PagedKVPool,
    SequenceTables,
    SlidingWindowSpec,
)
from kvcache.page_arithmetic import sentinel

FULL = FullAttentionSpec(4, 1, 16, kv_cache_dtype="nvfp4")
WINDOW = SlidingWindowSpec(4, 1, 16, kv_cache_dtype="nvfp4", sliding_window=5)


def full_tables(num_pages: int = 8, *, can_grow: bool = False) -> SequenceTables:
    pool = PagedKVPool([FULL], num_pages)
    pool.buffer.copy_(sentinel(*pool.buffer.shape))
    return SequenceTables(pool, can_grow=can_grow)


def window_tables(num_pages: int = 12) -> SequenceTables:
    """Group 0 is full attention, group 1 a window of 5; pages of 4 tokens in both."""
    return SequenceTables(PagedKVPool([FULL, WINDOW], num_pages))


def test_append_takes_a_page_only_when_the_last_is_full() -> None:
    tables = full_tables()
    tables.add("a")
    pages: list[int] = []
    for count, expected in ((0, 0), (1, 1), (3, 1), (1, 2), (8, 4)):
        tables.append("a", count)
        assert tables.table("a")[: len(pages)] == pages
        pages = tables.table("a")
        assert len(pages) == expected
        assert tables.allocator.num_used == expected
    assert tables.length("a") == 13
    assert NULL_PAGE not in pages
    tables.check_integrity()


def test_slots_are_pages_times_block_size_plus_offsets() -> None:
    tables = full_tables()
    tables.add("other")
    tables.append("other", 5)
    tables.add("a")
    tables.append("a", 10)
    table = tables.table("a")
    expected = [table[i // 4] * 4 + i % 4 for i in range(10)]
    slots = tables.slots("a", 0, 10)
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected
    assert tables.slots("a", 3, 9).tolist() == expected[3:9]
    assert tables.slots("a", 4, 4).tolist() == []


def test_slots_of_an_empty_sequence_are_none() -> None:
    tables = full_tables()
    tables.add("a")
    assert tables.slots("a", 0, 0).shape == (0,)


def test_table_is_a_copy() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 4)
    tables.table("a").clear()
    assert len(tables.table("a")) == 1


def test_out_of_pages_leaves_the_sequence_as_it_was() -> None:
    tables = full_tables(num_pages=4)
    tables.add("a")
    tables.append("a", 6)
    before = tables.table("a")
    with pytest.raises(OutOfPagesError):
        tables.append("a", 7)
    assert (tables.table("a"), tables.length("a")) == (before, 6)
    assert tables.allocator.num_free == 1
    tables.append("a", 6)
    tables.check_integrity()


def test_out_of_pages_by_the_copy_of_a_shared_page_alone() -> None:
    tables = full_tables(num_pages=3)
    tables.add("a")
    tables.append("a", 6)
    tables.fork("a", "b")
    before = tables.pool.buffer.clone()
    with pytest.raises(OutOfPagesError):
        tables.append("b", 1)
    assert tables.table("a") == tables.table("b")
    assert torch.equal(tables.pool.buffer, before)
    tables.check_integrity()


def test_fork_copies_only_the_partial_page_and_at_a_write() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 6)
    tables.fork("a", "b")
    assert tables.allocator.num_used == 2
    first, second = tables.table("a")
    content = tables.pool.read_pages([second])
    tables.append("b", 1)
    assert tables.table("a") == [first, second]
    assert tables.table("b")[0] == first
    fresh = tables.table("b")[1]
    assert fresh not in (first, second)
    assert torch.equal(tables.pool.read_pages([fresh]), content)
    # The parent holds its page alone again and writes in place.
    tables.append("a", 1)
    assert tables.table("a") == [first, second]
    tables.check_integrity()


def test_fork_at_a_page_boundary_copies_nothing() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 8)
    tables.fork("a", "b")
    tables.append("b", 1)
    assert tables.table("b")[:2] == tables.table("a")
    assert tables.allocator.num_used == 3


def test_crop_into_a_shared_page_makes_the_next_append_copy_it() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 8)
    tables.fork("a", "b")
    tables.crop("b", 5)
    assert tables.table("b") == tables.table("a")
    tables.append("b", 1)
    assert tables.table("b")[1] != tables.table("a")[1]
    tables.check_integrity()


@pytest.mark.parametrize(("length", "pages"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_crop_gives_up_pages_past_the_length(length: int, pages: int) -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 9)
    before = tables.table("a")
    tables.crop("a", length)
    assert (tables.table("a"), tables.length("a")) == (before[:pages], length)
    assert tables.allocator.num_used == pages
    tables.check_integrity()


@pytest.mark.parametrize("length", [-1, 10])
def test_crop_refuses_lengths_that_the_sequence_never_had(length: int) -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 9)
    with pytest.raises(ValueError, match="length"):
        tables.crop("a", length)
    assert tables.length("a") == 9


def test_release_dead_pages_frees_those_before_the_window() -> None:
    tables = window_tables()
    tables.add("a")
    tables.append("a", 13)
    for computed, dead in ((0, 0), (7, 0), (8, 1), (11, 1), (12, 2), (13, 2)):
        tables.release_dead_pages("a", computed)
        table = tables.table("a", group=1)
        assert [page == NULL_PAGE for page in table] == [i < dead for i in range(4)]
        assert NULL_PAGE not in tables.table("a", group=0)
        assert tables.allocator.num_used == 4 + 4 - dead
        tables.check_integrity()


def test_release_dead_pages_goes_through_each_page_once() -> None:
    """The cost of a step does not grow with the length of the sequence."""
    tables = window_tables(num_pages=400)
    tables.add("a")
    released: list[int] = []
    release = tables.allocator.release

    def counted(pages: Iterable[int]) -> None:
        released.extend(pages)
        release(pages)

    tables.allocator.release = counted  # type: ignore[method-assign]
    for length in range(1, 1000):
        tables.append("a", 1)
        tables.release_dead_pages("a", length)
    tables.check_integrity()
    assert NULL_PAGE not in released
    assert len(released) == tables.table("a", group=1).count(NULL_PAGE)


def test_release_dead_pages_of_a_fork_keeps_the_parents() -> None:
    tables = window_tables()
    tables.add("a")
    tables.append("a", 13)
    before = tables.table("a", group=1)
    tables.fork("a", "b")
    tables.release_dead_pages("b", 13)
    assert tables.table("a", group=1) == before
    assert tables.allocator.num_used == 8
    tables.free("a")
    assert tables.allocator.num_used == 6
    tables.check_integrity()


def test_release_dead_pages_keeps_the_page_of_the_next_token() -> None:
    tables = window_tables()
    tables.add("a")
    tables.append("a", 2)
    # More tokens than the sequence has: refused, or without effect on its partial page.
    with suppress(ValueError):
        tables.release_dead_pages("a", 100)
    tables.append("a", 1)
    assert NULL_PAGE not in tables.table("a", group=1)


def test_crop_refuses_to_go_back_to_pages_that_were_released() -> None:
    tables = window_tables()
    tables.add("a")
    tables.append("a", 13)
    tables.release_dead_pages("a", 12)
    before = [tables.table("a", group) for group in (0, 1)]
    with pytest.raises(ValueError, match="released"):
        tables.crop("a", 11)
    assert [tables.table("a", group) for group in (0, 1)] == before
    tables.crop("a", 12)
    tables.crop("a", 0)
    assert tables.allocator.num_used == 0
    tables.check_integrity()


@pytest.mark.parametrize("length", range(24))
def test_crop_needs_the_pages_that_the_window_reaches(length: int) -> None:
    """A query at `length` reads the 4 tokens before it, in pages that must be there still."""
    tables = window_tables(20)
    tables.add("a")
    tables.append("a", 23)
    tables.release_dead_pages("a", 15)
    assert tables.table("a", group=1).count(NULL_PAGE) == 2  # positions 0 to 7
    needed = range(max(0, length - WINDOW.sliding_window + 1), length)
    if any(position < 8 for position in needed):
        with pytest.raises(ValueError, match="released"):
            tables.crop("a", length)
        assert tables.length("a") == 23
    else:
        tables.crop("a", length)
        assert [len(tables.table("a", group)) for group in (0, 1)] == [-(-length // 4)] * 2
    tables.check_integrity()


def test_move_out_frees_and_move_in_brings_back_every_byte() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 10)
    content = tables.pool.read_pages(tables.table("a"))
    host = tables.move_out("a")
    assert "a" not in tables
    assert tables.allocator.num_used == 0
    assert host.length == 10
    assert host.data.device.type == "cpu"
    tables.pool.buffer.zero_()
    tables.add("other")
    tables.append("other", 3)
    tables.move_in("b", host)
    assert tables.length("b") == 10
    assert torch.equal(tables.pool.read_pages(tables.table("b")), content)
    tables.check_integrity()


def test_move_out_carries_live_pages_only() -> None:
    tables = window_tables()
    tables.add("a")
    tables.append("a", 13)
    tables.release_dead_pages("a", 13)
    host = tables.move_out("a")
    assert host.data.shape[0] == 6
    tables.move_in("a", host)
    assert [page == NULL_PAGE for page in tables.table("a", 1)] == [True, True, False, False]
    assert tables.allocator.num_used == 6
    tables.check_integrity()


def test_move_out_of_a_fork_leaves_the_parent() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 6)
    tables.fork("a", "b")
    host = tables.move_out("b")
    assert tables.allocator.num_used == 2
    tables.move_in("b", host)
    assert not set(tables.table("a")) & set(tables.table("b"))
    tables.check_integrity()


def test_move_in_without_room_changes_nothing() -> None:
    tables = full_tables(num_pages=4)
    tables.add("a")
    tables.append("a", 8)
    host = tables.move_out("a")
    tables.add("b")
    tables.append("b", 8)
    before = tables.pool.buffer.clone()
    with pytest.raises(OutOfPagesError):
        tables.move_in("a", host)
    assert "a" not in tables
    assert torch.equal(tables.pool.buffer, before)
    tables.check_integrity()
    tables.free("b")
    tables.move_in("a", host)


@pytest.mark.parametrize("specs", [[replace(FULL, head_size=32)], [FULL, WINDOW]])
def test_move_in_from_another_pool_is_refused(
    specs: list[FullAttentionSpec],
) -> None:
    elsewhere = SequenceTables(PagedKVPool(specs, 8))
    elsewhere.add("a")
    elsewhere.append("a", 4)
    host = elsewhere.move_out("a")
    tables = full_tables()
    with pytest.raises(ValueError, match=r"host|data|pages|groups"):
        tables.move_in("a", host)
    assert "a" not in tables
    tables.check_integrity()


def test_can_grow_enlarges_pool_and_allocator_together() -> None:
    tables = full_tables(num_pages=3, can_grow=True)
    tables.add("a")
    tables.append("a", 8)
    before = tables.pool.read_pages(tables.table("a"))
    tables.append("a", 1)
    assert tables.pool.num_pages == tables.allocator.num_pages == 6
    tables.append("a", 100)
    assert tables.pool.num_pages == tables.allocator.num_pages >= 29
    assert torch.equal(tables.pool.read_pages(tables.table("a")[:2]), before)
    tables.check_integrity()


def test_can_grow_makes_room_for_a_sequence_that_comes_back() -> None:
    tables = full_tables(num_pages=3, can_grow=True)
    tables.add("a")
    tables.append("a", 8)
    host = tables.move_out("a")
    tables.add("b")
    tables.append("b", 8)
    tables.move_in("a", host)
    assert torch.equal(tables.pool.read_pages(tables.table("a")), host.data)
    tables.check_integrity()


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("length", ("x",)),
        ("table", ("x",)),
        ("append", ("x", 1)),
        ("crop", ("x", 0)),
        ("fork", ("x", "y")),
        ("free", ("x",)),
        ("move_out", ("x",)),
        ("slots", ("x", 0, 0)),
        ("release_dead_pages", ("x", 0)),
    ],
)
def test_unknown_sequences_are_refused(operation: str, arguments: tuple[object, ...]) -> None:
    tables = full_tables()
    with pytest.raises(ValueError, match="'x' does not exist"):
        getattr(tables, operation)(*arguments)
    assert len(tables) == 0


def test_names_in_use_and_negative_counts_are_refused() -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 3)
    tables.add("b")
    host = tables.move_out("b")
    tables.add("b")
    for operation in (
        lambda: tables.add("a"),
        lambda: tables.fork("a", "b"),
        lambda: tables.move_in("a", host),
    ):
        with pytest.raises(ValueError, match="already exists"):
            operation()
    with pytest.raises(ValueError, match="count"):
        tables.append("a", -1)
    assert (tables.length("a"), tables.length("b"), len(tables)) == (3, 0, 2)
    tables.check_integrity()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 9)])
def test_slots_outside_the_table_are_refused(start: int, stop: int) -> None:
    tables = full_tables()
    tables.add("a")
    tables.append("a", 3)
    with pytest.raises((ValueError, IndexError)):
        tables.slots("a", start, stop)


def test_pages_that_could_not_be_filled_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = full_tables(20)
    tables.add("a")
    tables.append("a", 21)
    tables.fork("a", "b")
    host = tables.move_out("a")
    tables.fork("b", "c")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tables.pool, "copy_pages", fail)
        patch.setattr(tables.pool, "write_pages", fail)
        with pytest.raises(torch.OutOfMemoryError):
            tables.append("b", 1)
        with pytest.raises(torch.OutOfMemoryError):
            tables.move_in("a", host)
    tables.check_integrity()
    assert tables.length("b") == 21
    tables.move_in("a", host)
    tables.append("b", 1)
    tables.check_integrity()
