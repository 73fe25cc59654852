"""The decode steps of a report as a bar chart in SVG, for light and dark backgrounds."""

from pathlib import Path
from typing import Any

from benchmarks.attention.cases import WITHOUT_PEERS
from benchmarks.attention.table import case_label, heads_label
from benchmarks.svg import INK, svg_figure

BARS = (
    ("halfbyte_nvfp4", "halfbyte, NVFP4 cache", "#e8590c"),
    ("flashinfer_fp8", "FlashInfer, FP8 cache", "#5c8fd6"),
    ("flashinfer_bf16", "FlashInfer, BF16 cache", "#8a96a3"),
)
_WIDTH = 0.27


def _is_drawn(kind: str, name: str) -> bool:
    return kind == "decode" and name not in WITHOUT_PEERS


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: matplotlib is missing, or the report holds no decode step on an NVFP4 cache.
    """
    rows = [
        row
        for row in report["microseconds"]
        if _is_drawn(row["kind"], row["name"]) and "single" in row.get("halfbyte_nvfp4", {})
    ]
    if not rows:
        raise ValueError("picture: the report has no decode step on an nvfp4 cache")
    with svg_figure(path, (max(10.0, 1.15 * len(rows)), 4.2)) as figure:
        _draw_bars(figure.add_subplot(), report, rows)


def _draw_bars(axes: Any, report: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3.8, foreground="white")]
    drawn = []
    for name, label, color in BARS:
        shown = [(x, row) for x, row in enumerate(rows) if "single" in row.get(name, {})]
        bars = axes.bar(
            [x + _offset(row, name) for x, row in shown],
            [row[name]["single"] for _, row in shown],
            _WIDTH * 0.92,
            color=color,
            label=label,
        )
        axes.bar_label(bars, fmt="%.0f", color=INK, fontsize=9, padding=1.5)
        drawn += [bars] if shown else []
    ours = BARS[0][0]
    centers = [x + _offset(row, ours) for x, row in enumerate(rows)]
    floors = axes.hlines(
        [row[ours]["bytes"] / report["read_terabytes_per_s"] / 1e6 for row in rows],
        [x - 0.46 * _WIDTH for x in centers],
        [x + 0.46 * _WIDTH for x in centers],
        color="black",
        linewidth=1.6,
        label="time to read the NVFP4 bytes",
        path_effects=halo,
    )
    axes.set_xticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.yaxis.grid(True, color=INK, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.01, y=0.08)
    title = f"µs for attention of one decode step ({report['gpu'] or 'CPU'}; less is better)"
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=26)
    legend = axes.legend(
        handles=[*drawn, floors],
        frameon=False,
        labelcolor=INK,
        fontsize=9.5,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
    )
    legend.legend_handles[-1].set_path_effects(halo)


def _offset(row: dict[str, Any], name: str) -> float:
    """Offset of a bar in its group; missing bars leave no gap."""
    shown = [other for other, _, _ in BARS if "single" in row.get(other, {})]
    return (shown.index(name) - (len(shown) - 1) / 2) * _WIDTH


def _label(row: dict[str, Any]) -> str:
    """Short lines below a group of bars."""
    heads, *others = heads_label(row).replace(" with", "\nwith").split(", ")
    window = [text for text in others if text.startswith("window")]
    return "\n".join([case_label(row).replace(" to ", "\nto "), heads, *window])
