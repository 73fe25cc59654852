"""Tables and the picture of decode steps inside vLLM, from the committed runs.

    python -m benchmarks.vllm_figures

`vllm_step.py` and `recipe_speed.py` measure; this writes docs/.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import put_table

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "vllm_step.json"
RECIPES = REPOSITORY / "benchmarks" / "results" / "recipe_speed.json"
PICTURE = REPOSITORY / "docs" / "vllm_step.svg"
PAGE = REPOSITORY / "docs" / "numbers" / "vllm.md"
RECIPES_PAGE = REPOSITORY / "docs" / "recipes.md"
COLORS = ("#8a96a3", "#5c8fd6", "#3b6fb6", "#f4a261", "#e8590c", "#b23c00")
_INK = "#7d8590"


def cases_of(report: dict[str, Any]) -> list[str]:
    """`64x8192` and so on, of the first variant."""
    first = next(row for row in report["results"].values() if "error" not in row)
    return [name for name, figures in first.items() if isinstance(figures, dict)]


def label(case: str) -> str:
    """`64 x 8,192`."""
    batch, context = map(int, case.split("x"))
    return f"{batch} x {context:,}"


def table(report: dict[str, Any]) -> str:
    """Milliseconds of a step, prefill of the first case, and tokens that fit, in Markdown."""
    cases = cases_of(report)
    heads = [*map(label, cases), f"prefill {label(cases[0])}", "tokens held"]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, figures in report["results"].items():
        if "error" in figures:
            continue
        steps = [f"{figures[c]['step_ms']:.2f} ms" if c in figures else "" for c in cases]
        name += dagger(figures)
        prefill = f"{figures[cases[0]]['prefill_tokens_per_s'] / 1e3:.1f}k/s"
        tokens = f"{figures['kv_cache_tokens'] / 1e3:,.0f}k"
        lines.append("| " + " | ".join((name, *steps, prefill, tokens)) + " |")
    return "\n".join(lines) + "\n"


def dagger(figures: dict[str, Any]) -> str:
    """A mark behind the name of a variant whose prompts came one by one; see the page."""
    return "" if figures["prompts"] == "at once" else " †"


def recipes_table(report: dict[str, Any]) -> str:
    """Microseconds of single calls, and their ratio to `plain`, in Markdown."""
    names = ("plain", "without the last tokens", "balanced", "accurate")
    lines = ["| µs | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for case, times in report["microseconds"].items():
        cells = [
            f"{times[n]['single']:.1f}" + ("" if n == "plain" else f" ({times[n]['of_plain']:.2f})")
            for n in names
            if n in times
        ]
        cells += [""] * (len(names) - len(cells))
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of milliseconds, for light and dark backgrounds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases = cases_of(report)
    variants = [pair for pair in report["results"].items() if "error" not in pair[1]]
    width = 0.84 / len(variants)
    # Text stays text, and the same report gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "halfbyte"}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for i, (name, figures) in enumerate(variants):
            offset = (i - (len(variants) - 1) / 2) * width
            known = [x for x, case in enumerate(cases) if case in figures]
            bars = axes.bar(
                [x + offset for x in known],
                [figures[cases[x]]["step_ms"] for x in known],
                0.92 * width,
                color=COLORS[i],
                label=name + dagger(figures),
            )
            axes.bar_label(bars, fmt="%.1f", color=_INK, fontsize=9, padding=1.5)
        axes.set_xticks(range(len(cases)), map(label, cases), fontsize=9)
        axes.tick_params(colors=_INK, length=0, labelsize=9)
        axes.yaxis.grid(True, color=_INK, alpha=0.25, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.margins(x=0.01, y=0.08)
        title = (
            f"ms of a decode step in vLLM, Llama-3.1-8B's shape ({report['gpu']}; less is better)"
        )
        axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold", pad=44)
        axes.legend(
            frameon=False,
            labelcolor=_INK,
            fontsize=9.5,
            ncols=3,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
        )
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def main() -> None:
    """Write all."""
    report = json.loads(RESULT.read_text())
    put_table(PAGE, "vllm-step", table(report))
    recipes = json.loads(RECIPES.read_text())
    put_table(RECIPES_PAGE, "recipe-speed", recipes_table(recipes))
    draw(report, PICTURE)


if __name__ == "__main__":
    main()
