"""Tables and pictures of steps and servers of vLLM, from the committed runs.

    python -m benchmarks.vllm_figures

`vllm_step.py`, `vllm_online.py` and `recipe_speed.py` measure; this writes docs/.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import put_table
from benchmarks.svg import INK, svg_figure

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
RESULT = RESULTS / "vllm_step.json"
OTHERS = {
    "vllm-step-house": RESULTS / "vllm_step_house.json",
    "vllm-step-qwen3": RESULTS / "vllm_step_qwen3_30b_a3b.json",
    "vllm-step-gpt-oss": RESULTS / "vllm_step_gpt_oss_20b.json",
}
"""More runs of `vllm_step`, by the name of their table."""
ONLINE = RESULTS / "vllm_online.json"
RECIPES = RESULTS / "recipe_speed.json"
PROFILE = RESULTS / "vllm_profile.json"
PICTURE = REPOSITORY / "docs" / "vllm_step.svg"
ONLINE_PICTURE = REPOSITORY / "docs" / "vllm_online.svg"
PAGE = REPOSITORY / "docs" / "numbers" / "vllm.md"
RECIPES_PAGE = REPOSITORY / "docs" / "recipes.md"
COLORS = ("#8a96a3", "#5c8fd6", "#3b6fb6", "#f4a261", "#e8590c", "#b23c00")


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
        prefill = f"{figures[cases[0]]['prefill_tokens_per_s'] / 1e3:.1f}k/s"
        tokens = f"{figures['kv_cache_tokens'] / 1e3:,.0f}k"
        lines.append("| " + " | ".join((name, *steps, prefill, tokens)) + " |")
    return "\n".join(lines) + "\n"


ONLINE_COLUMNS = {
    "mean_tpot_ms": "time per output token, mean",
    "p99_tpot_ms": "99 %",
    "mean_ttft_ms": "time to first token, mean",
    "p99_ttft_ms": "99 %",
}
"""Figures of `vllm bench serve` in milliseconds, and their headings."""


def online_table(report: dict[str, Any]) -> str:
    """Milliseconds per token and to the first token, by variant and rate, in Markdown."""
    heads = ["requests/s", *ONLINE_COLUMNS.values(), "output tokens/s"]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, rates in report["results"].items():
        for rate, row in rates.items():
            cells = [f"{row[column]:,.1f} ms" for column in ONLINE_COLUMNS]
            tokens = f"{row['output_throughput']:,.0f}"
            lines.append("| " + " | ".join((name, rate, *cells, tokens)) + " |")
    return "\n".join(lines) + "\n"


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


_KERNELS = {
    "decode": "attention: decode, with the merge that overlaps it",
    "linear_": "the four linear layers of every block",
    "nvjet_": "head (bfloat16, cuBLAS)",
    "triton_": "norms, activation, rotary embedding (Inductor's kernels)",
    "store": "storing K and V",
    "": "sampler, plan, inputs",
}
"""Rows of `profile_table`, by how the names of their kernels begin."""


def profile_table(report: dict[str, Any]) -> str:
    """Microseconds of a step by kind of kernel, and between kernels, in Markdown."""
    times = dict.fromkeys(_KERNELS.values(), 0.0)
    for kernel in report["profile"]["kernels"]:
        # Merge waits inside its launch until decode has ended: its time is decode's.
        if not kernel["name"].startswith("merge_"):
            row = next(row for begin, row in _KERNELS.items() if kernel["name"].startswith(begin))
            times[row] += kernel["us"]
    times["gaps between kernels"] = report["profile"]["idle"]
    rows = sorted(times.items(), key=lambda row: -row[1])
    lines = ["| | µs |", "|---|---:|", *(f"| {row} | {us:,.0f} |" for row, us in rows)]
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of milliseconds of a decode step."""
    cases = cases_of(report)
    bars = {
        name: [figures[case]["step_ms"] if case in figures else None for case in cases]
        for name, figures in report["results"].items()
        if "error" not in figures
    }
    title = f"ms of a decode step in vLLM, Llama-3.1-8B's shape ({report['gpu']}; less is better)"
    draw_bars(title, list(map(label, cases)), bars, path)


def draw_online(report: dict[str, Any], path: Path) -> None:
    """Bars of milliseconds per output token of a server."""
    rates = list(next(iter(report["results"].values())))
    columns = {"mean_tpot_ms": "mean", "p99_tpot_ms": "99 %"}
    bars = {
        name: [rows[rate][column] for rate in rates for column in columns]
        for name, rows in report["results"].items()
    }
    names = [f"{rate} requests/s, {what}" for rate in rates for what in columns.values()]
    title = f"ms per output token of vllm serve, Llama-3.1-8B's shape ({report['gpu']})"
    draw_bars(title, names, bars, path)


def draw_bars(
    title: str, groups: list[str], bars: dict[str, list[float | None]], path: Path
) -> None:
    """Bars of every variant in groups, for light and dark backgrounds.

    Args:
        bars: by variant, a value per group; None for no bar.
    """
    width = 0.84 / len(bars)
    with svg_figure(path, (11, 4.2)) as figure:
        axes = figure.add_subplot()
        for i, (name, values) in enumerate(bars.items()):
            offset = (i - (len(bars) - 1) / 2) * width
            known = [(x, value) for x, value in enumerate(values) if value is not None]
            drawn = axes.bar(
                [x + offset for x, _ in known],
                [value for _, value in known],
                0.92 * width,
                color=COLORS[i],
                label=name,
            )
            axes.bar_label(drawn, fmt="%.1f", color=INK, fontsize=9, padding=1.5)
        axes.set_xticks(range(len(groups)), groups, fontsize=9)
        axes.tick_params(colors=INK, length=0, labelsize=9)
        axes.yaxis.grid(True, color=INK, alpha=0.25, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.margins(x=0.01, y=0.08)
        axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=44)
        axes.legend(
            frameon=False,
            labelcolor=INK,
            fontsize=9.5,
            ncols=3,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
        )


def main() -> None:
    """Write all."""
    report = json.loads(RESULT.read_text())
    put_table(PAGE, "vllm-step", table(report))
    for name, file in OTHERS.items():
        put_table(PAGE, name, table(json.loads(file.read_text())))
    recipes = json.loads(RECIPES.read_text())
    put_table(RECIPES_PAGE, "recipe-speed", recipes_table(recipes))
    put_table(PAGE, "vllm-profile", profile_table(json.loads(PROFILE.read_text())))
    draw(report, PICTURE)
    online = json.loads(ONLINE.read_text())
    put_table(PAGE, "vllm-online", online_table(online))
    draw_online(online, ONLINE_PICTURE)


if __name__ == "__main__":
    main()
