"""`PageAllocator`: pages are allocated once, reference-counted and freed."""

import pytest

from halfbyte.kvcache import NULL_PAGE, OutOfPagesError, PageAllocator


def test_allocate_hands_out_every_page_but_the_null_page_once() -> None:
    allocator = PageAllocator(8)
    assert (allocator.num_pages, allocator.num_free, allocator.num_used) == (8, 7, 0)
    pages = allocator.allocate(3) + allocator.allocate(0) + allocator.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_PAGE not in pages
    assert (allocator.num_free, allocator.num_used) == (0, 7)
    assert all(allocator.num_holders(page) == 1 for page in pages)
    allocator.check_integrity()


def test_out_of_pages_allocates_none() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfPagesError, match="3 needed, 2 of 3 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    allocator.check_integrity()
    assert len(allocator.allocate(2)) == 2


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.retain([page])
    allocator.retain([page])
    for holders in (2, 1):
        allocator.release([page])
        assert allocator.num_holders(page) == holders
        assert allocator.num_free == 1
    allocator.release([page])
    assert (allocator.num_holders(page), allocator.num_free) == (0, 2)
    allocator.check_integrity()


def test_max_used_is_the_peak() -> None:
    allocator = PageAllocator(8)
    assert allocator.max_used == 0
    first = allocator.allocate(3)
    assert allocator.max_used == 3
    allocator.retain(first)
    allocator.release(first)
    allocator.release(first[:2])
    second = allocator.allocate(1)
    assert (allocator.num_used, allocator.max_used) == (2, 3)
    second += allocator.allocate(2)
    assert (allocator.num_used, allocator.max_used) == (4, 4)
    allocator.release(second)
    assert (allocator.num_used, allocator.max_used) == (1, 4)


def test_the_null_page_is_nobodys() -> None:
    allocator = PageAllocator(3)
    allocator.retain([NULL_PAGE, NULL_PAGE])
    allocator.release([NULL_PAGE])
    assert allocator.num_holders(NULL_PAGE) == 0
    allocator.check_integrity()


@pytest.mark.parametrize("operation", ["retain", "release"])
def test_free_pages_cannot_be_retained_or_released(operation: str) -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    with pytest.raises(ValueError, match="is free"):
        getattr(allocator, operation)([page])
    allocator.check_integrity()


@pytest.mark.parametrize("page", [-1, 3])
@pytest.mark.parametrize("operation", ["retain", "release"])
def test_pages_that_do_not_exist_are_refused(operation: str, page: int) -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises((ValueError, IndexError)):
        getattr(allocator, operation)([page])
    assert (allocator.num_holders(1), allocator.num_holders(2)) == (1, 1)


def test_grow_adds_free_pages_and_keeps_holders() -> None:
    allocator = PageAllocator(3)
    held = allocator.allocate(2)
    allocator.grow(6)
    assert (allocator.num_pages, allocator.num_free, allocator.num_used) == (6, 3, 2)
    assert sorted(allocator.allocate(3)) == [3, 4, 5]
    assert all(allocator.num_holders(page) == 1 for page in held)
    allocator.grow(6)
    allocator.check_integrity()


def test_refusals() -> None:
    allocator = PageAllocator(3)
    with pytest.raises(ValueError, match="shrink"):
        allocator.grow(2)
    with pytest.raises(ValueError, match="count"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(1)


def test_check_integrity_notices_a_lost_page() -> None:
    allocator = PageAllocator(4)
    (page,) = allocator.allocate(1)
    allocator._holders[page] = 0
    with pytest.raises(AssertionError, match="free or lost"):
        allocator.check_integrity()


def test_check_integrity_notices_a_page_that_is_free_twice() -> None:
    allocator = PageAllocator(4)
    allocator._free.append(2)
    with pytest.raises(AssertionError, match="free twice"):
        allocator.check_integrity()
