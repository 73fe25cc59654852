"""Free list and reference counts of pages. The pool holds the bytes."""

from collections import deque
from collections.abc import Iterable

NULL_PAGE = 0
"""Never allocated: a placeholder in block tables for pages that were freed or never existed."""


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than requested; nothing was allocated."""


class PageAllocator:
    """Allocates page numbers and counts their references (holders).

    Args:
        num_pages: pages of the pool, the null page included.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: expected at least 2 (one is reserved), got {num_pages}")
        self._holders = [0] * num_pages
        self._free = deque(range(NULL_PAGE + 1, num_pages))
        self.max_used = 0
        """Max number of pages held at once so far."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one holder."""
        return self.num_pages - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one holder each.

        Raises:
            OutOfPagesError: fewer are free; none is allocated.
        """
        if count < 0:
            raise ValueError(f"count: expected a number >= 0, got {count}")
        if count > len(self._free):
            raise OutOfPagesError(
                f"out of KV cache pages: {count} needed, {len(self._free)} of "
                f"{self.num_pages - 1} free"
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        self.max_used = max(self.max_used, self.num_used)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to each page (the null page is skipped)."""
        for page in self._checked(pages):
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; pages without holders become free."""
        for page in self._checked(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _checked(self, pages: Iterable[int]) -> list[int]:
        """Return the pages without the null page.

        Raises:
            ValueError: one of them is free or does not exist; nothing has changed then.
        """
        real = [page for page in pages if page != NULL_PAGE]
        for page in real:
            if not 0 < page < self.num_pages or not self._holders[page]:
                raise ValueError(f"page {page} is free or does not exist")
        return real

    def num_holders(self, page: int) -> int:
        """Holders of a page; 0 if it is free."""
        return self._holders[page]

    def grow(self, num_pages: int) -> None:
        """Add free pages up to `num_pages` in all."""
        if num_pages < self.num_pages:
            raise ValueError(f"num_pages: cannot shrink from {self.num_pages} to {num_pages}")
        self._free.extend(range(self.num_pages, num_pages))
        self._holders.extend([0] * (num_pages - self.num_pages))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is either free once or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert NULL_PAGE not in free, "the null page is free"
        assert self._holders[NULL_PAGE] == 0, "the null page has holders"
        for page in range(1, self.num_pages):
            held = self._holders[page]
            assert held >= 0, f"page {page} has {held} holders"
            assert (held == 0) == (page in free), f"page {page}: {held} holders, free or lost"
