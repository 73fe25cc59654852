"""Pictures of a run of `kv_recipes.py`: KL against bits and position, errors of logits by layer."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.kv_recipe_tables import label
from benchmarks.svg import INK, svg_figure

PICTURES = ("accuracy_bits.svg", "accuracy_position.svg", "accuracy_layers.svg")
_COLORS = {
    "`fp8_e4m3`": "#5c8fd6",
    "`nvfp4_4over6`": "#b08bd0",
    "`nvfp4`": "#8a96a3",
    "`nvfp4`, balanced": "#e8590c",
    "`nvfp4`, accurate": "#2f9e44",
}
"""Caches that are drawn; those without the last tokens are in the tables."""


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write `PICTURES` into a folder; the same report gives the same files."""
    for name, part, fill in zip(
        PICTURES, ("models", "long", "layers"), (_bits, _position, _layers), strict=True
    ):
        models = report[part]
        with svg_figure(folder / name, (10.0, 3.6), font_size=9.0) as figure:
            axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
            for ax, (model, rows) in zip(axes, models.items(), strict=True):
                fill(ax, rows)
                ax.set_title(model, fontsize=10, color=INK)
                _tidy(ax)
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(
                handles,
                labels,
                loc="outside upper center",
                ncols=len(labels),
                frameon=False,
                labelcolor=INK,
                fontsize=9,
            )


def _drawn(rows: list[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Name, colour and rows of each cache."""
    return [
        (cache.replace("`", ""), color, of_cache)
        for cache, color in _COLORS.items()
        if (of_cache := [row for row in rows if label(row) == cache])
    ]


def _bits(ax: Axes, rows: list[dict[str, Any]]) -> None:
    sixteen = next(row for row in rows if row["kv_cache_dtype"] == "bfloat16")
    for name, color, (row,) in _drawn(rows):
        bits = 16 * row["bytes_per_token"] / sixteen["bytes_per_token"]
        ax.plot(bits, row["kl_divergence"], "o", markersize=9, color=color, label=name)
    ax.set(xlim=(4, 8.5), yscale="log", xlabel="bits per value", ylabel="KL to bf16")


def _position(ax: Axes, rows: list[dict[str, Any]]) -> None:
    for name, color, (row,) in _drawn(rows):
        kl = row["kl_by_position"]
        ax.plot([2 * i + 1 for i in range(len(kl))], kl, "o-", color=color, label=name)
    ax.set(yscale="log", xlabel="position in the context, thousands", ylabel="KL to bf16")


def _layers(ax: Axes, rows: list[dict[str, Any]]) -> None:
    for name, color, of_cache in _drawn(rows):
        errors = [row["logit_error"] for row in sorted(of_cache, key=lambda row: row["layer"])]
        ax.plot(errors, "o-", markersize=4, color=color, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(yscale="log", xlabel="layer", ylabel="error of logits, nats")


def _tidy(ax: Axes) -> None:
    ax.grid(axis="y", which="both", color=INK, alpha=0.15)
    ax.tick_params(colors=INK, which="both")
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)
    for name, spine in ax.spines.items():
        spine.set_visible(name in {"left", "bottom"})
        spine.set_color(INK)
