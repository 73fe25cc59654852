"""Times of experts over tokens as a line chart in SVG, for light and dark backgrounds."""

from pathlib import Path
from typing import Any

from benchmarks.svg import INK, svg_figure

LINES = (
    ("cuda", "halfbyte", "#e8590c", "-"),
    ("humming", "Humming", "#5c8fd6", "-"),
    ("vllm_marlin", "vLLM, Marlin", "#8a96a3", "-"),
    ("triton_kernels", "triton_kernels", "#2f9e74", "-"),
    ("vllm_bf16", "vLLM, Triton on bfloat16", "#8a96a3", "--"),
    ("plain_read", "reading the bytes of the experts hit", "#7d8590", ":"),
)


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture: a panel per shape, both axes logarithmic.

    Args:
        report: of `MoeRun`.
        path: of the SVG.

    Raises:
        ValueError: matplotlib is missing, or the report has no time of `cuda`.
    """
    timing = report["judged_by"][0]
    rows = [
        row for row in report["microseconds"] if timing in row["contenders"].get(LINES[0][0], {})
    ]
    if not rows:
        raise ValueError(f"picture: the report has no times of {LINES[0][0]}")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    with svg_figure(path, (10.0, 4.0)) as figure:
        panels = figure.subplots(1, len(shapes), squeeze=False)[0]
        shown: dict[str, Any] = {}
        for axes, shape in zip(panels, shapes, strict=True):
            shown |= _draw_lines(axes, [row for row in rows if row["shape"] == shape], timing)
            title = f"{shape} ({report['gpu'] or 'CPU'})"
            axes.set_title(title, loc="left", color=INK, fontsize=10)
        panels[0].set_ylabel("µs", color=INK)
        figure.legend(
            *(list(shown.values()), list(shown)),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
            ncols=3,
            loc="outside upper left",
        )


def _draw_lines(axes: Any, rows: list[dict[str, Any]], timing: str) -> dict[str, Any]:
    """Draw a panel; its lines by label."""
    drawn = {}
    for name, label, color, style in LINES:
        shown = [row for row in rows if timing in row["contenders"].get(name, {})]
        if not shown:
            continue
        tokens = [row["m"] for row in shown]
        times = [row["contenders"][name][timing] for row in shown]
        width = 2.4 if name == LINES[0][0] else 1.4
        (drawn[label],) = axes.plot(tokens, times, style, color=color, linewidth=width, marker=".")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [row["m"] for row in rows]
    axes.set_xticks(ticks, [f"{m:,}" for m in ticks], fontsize=8)
    axes.minorticks_off()
    axes.tick_params(colors=INK, length=0, labelsize=8)
    axes.set_xlabel("tokens", color=INK, fontsize=9)
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.7)
    axes.spines[:].set_visible(False)
    return drawn
