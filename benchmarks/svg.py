"""Pictures in SVG, for light and dark backgrounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INK = "#7d8590"
"""Legible on white and on black."""


@contextmanager
def svg_figure(path: Path, size: tuple[float, float], font_size: float = 10.0) -> Iterator[Any]:
    """A matplotlib figure, written to `path` at the end; the same drawing gives the same file.

    Args:
        path: of the SVG; not written if drawing raises.
        size: in inches.
        font_size: where nothing else is said.

    Raises:
        ValueError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("picture: needs matplotlib (pip install 'halfbyte[bench]')")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "halfbyte", "font.size": font_size}
    with mpl.rc_context(options):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
