"""Tables of a run of `kv_recipes.py`, in Markdown."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from halfbyte.kvcache import KVRecipe

_NAMES = {
    recipe.of_pages.name: f"{recipe.name} without the last 64 tokens"
    for recipe in map(KVRecipe.parse, ("balanced", "accurate"))
}
_UNWEIGHED = replace(KVRecipe.parse("balanced"), weighted_scales=False)
"""`balanced` of runs from before it chose block scales by weighted error."""
_NAMES[_UNWEIGHED.name] = "balanced with `four_over_six`"
_NAMES[_UNWEIGHED.of_pages.name] = "balanced with `four_over_six`, without the last 64 tokens"


def table(report: dict[str, Any]) -> str:
    """Cost on texts of 2,048 tokens, in Markdown."""
    lines = [
        "| model | K/V cache | change in NLL | KL to bf16 | top-1 agreement |",
        "|---|---|---:|---:|---:|",
    ]
    for name, rows in report["models"].items():
        for row in rows:
            if row["kv_cache_dtype"] == "bfloat16":
                continue
            lines.append(
                f"| {name} | {label(row)} | {of_baseline(row):+.2%} "
                f"± {of_baseline(row, 'nll_increase_stderr'):.2%} | {row['kl_divergence']:.4f} "
                f"| {row['top1']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def table_by_position(report: dict[str, Any]) -> str:
    """KL by position in one long context, in Markdown."""
    tables = []
    for name, rows in report["long"].items():
        ranges = [f"{2 * i}k to {2 * i + 2}k" for i in range(len(rows[0]["kl_by_position"]))]
        lines = [f"| {name}, KL to bf16 | " + " | ".join(ranges) + " |"]
        lines.append("|---|" + "---:|" * len(ranges))
        for row in rows:
            if row["kv_cache_dtype"] != "bfloat16":
                figures = " | ".join(f"{x:.4f}" for x in row["kl_by_position"])
                lines.append(f"| {label(row)} | {figures} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def table_of_text(report: dict[str, Any]) -> str:
    """Greedy continuations and retrieval, in Markdown."""
    lines = [
        "| model | K/V cache | tokens that agree with bf16 | prompts without a difference |",
        "|---|---|---:|---:|",
    ]
    for name, rows in report["greedy"].items():
        for row in rows:
            if row["kv_cache_dtype"] != "bfloat16":
                lines.append(
                    f"| {name} | {label(row)} | {row['agreed']:.1f} ± {row['agreed_stderr']:.1f} "
                    f"of {row['new_tokens']} | {row['whole']} of {row['prompts']} |"
                )
    lines += ["", "| model | K/V cache | codes found | NLL of a repeated segment |"]
    lines += ["|---|---|---:|---:|"]
    for name, rows in report["retrieval"].items():
        lines += [
            f"| {name} | {label(row)} | {row['codes']} of {row['asked']} "
            f"| {row['repeated_nll']:.2f} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def table_of_small_chunks(report: dict[str, Any]) -> str:
    """The first table's figures of one model by tokens fed at once, in Markdown."""
    lines = [
        "| model | K/V cache | KL in chunks of 512 tokens | of 16 tokens | change in NLL, of 16 |",
        "|---|---|---:|---:|---:|",
    ]
    for name, rows in report["small_chunks"].items():
        large = {label(row): row["kl_divergence"] for row in report["models"][name]}
        for row in rows:
            if row["kv_cache_dtype"] == "bfloat16":
                continue
            lines.append(
                f"| {name} | {label(row)} | {large[label(row)]:.4f} | {row['kl_divergence']:.4f} "
                f"| {of_baseline(row):+.2%} |"
            )
    return "\n".join(lines) + "\n"


def table_of_layers(report: dict[str, Any]) -> str:
    """SQNR of K and errors of logits over the layers of each model, in Markdown."""
    lines = [
        "| model | K/V cache | SQNR of K in dB, lowest and highest layer | error of logits |",
        "|---|---|---:|---:|",
    ]
    for name, rows in report["layers"].items():
        for cache in dict.fromkeys(map(label, rows)):
            of_cache = [row for row in rows if label(row) == cache]
            sqnr, error = (
                sorted(row[field] for row in of_cache) for field in ("k_sqnr_db", "logit_error")
            )
            lines.append(
                f"| {name} | {cache} | {sqnr[0]:.1f} to {sqnr[-1]:.1f} "
                f"| {error[0]:.3f} to {error[-1]:.3f} |"
            )
    return "\n".join(lines) + "\n"


def of_baseline(row: dict[str, Any], field: str = "nll_increase") -> float:
    """A row's field over the NLL that its `nll_increase` is counted from."""
    ratio: float = row[field] / (row["nll"] - row["nll_increase"])
    return ratio


def label(row: dict[str, Any]) -> str:
    """Name of a row's format and recipe."""
    recipe = _NAMES.get(row["kv_recipe"], row["kv_recipe"])
    return f"`{row['kv_cache_dtype']}`" + ("" if recipe == "plain" else f", {recipe}")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "real-models": table,
    "small-chunks": table_of_small_chunks,
    "by-layer": table_of_layers,
    "by-position": table_by_position,
    "text": table_of_text,
}
"""Functions that write tables, by the names of their markers in the pages."""
