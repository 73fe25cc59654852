"""Progress bars for many prompts and for start-up."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm


@contextmanager
def capture_bar(total: int) -> Iterator[Callable[[], None]]:
    """Progress of compiling and capturing CUDA graphs, `total` calls; shown on a terminal."""
    if not total or not sys.stderr.isatty():
        yield lambda: None
        return
    with tqdm(total=total, desc="CUDA graphs", unit="capture", leave=False) as bar:
        yield lambda: bar.update() and None


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Progress of requests; call after each token with the number of unfinished requests.

    Args:
        total: requests.
        show: None for more than one on a terminal.
    """
    if show is None:
        show = total > 1 and sys.stderr.isatty()
    if not show:
        yield lambda unfinished: None
        return
    tokens = 0
    with tqdm(total=total, desc="requests", unit="request", dynamic_ncols=True) as bar:

        def update(unfinished: int) -> None:
            nonlocal tokens
            tokens += 1
            bar.update(total - unfinished - bar.n)
            elapsed = bar.format_dict["elapsed"]
            if elapsed:
                bar.set_postfix_str(f"{tokens / elapsed:,.1f} tokens/s", refresh=False)

        yield update
        bar.update(total - bar.n)
