"""What formats and recipes of the KV cache cost on real models: JSON of the run, and tables.

    make accuracy

Each model (`real_models`) predicts the texts in windows of 2,048 tokens that are fed in chunks, so
that everything is read back from packed pages. Calibration is on the built-in text; nothing was
tuned on these.
"""

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from real_models import MODELS, model_folder, texts

from halfbyte import load_model
from halfbyte.bench.machine import machine, versions
from halfbyte.evaluation import evaluate_perplexity, text_windows
from halfbyte.kvcache import KVRecipe
from halfbyte.models import load_tokenizer

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "kv_recipes.json"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "accuracy.md")
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4_4over6", "nvfp4")
BALANCED = KVRecipe.parse("balanced")
RECIPES = ("plain", BALANCED.of_pages, BALANCED)
NAMES = {BALANCED.of_pages.name: "balanced without the last 64 tokens"}
WINDOW = 2048
LONG = {"SmolLM2-135M-Instruct": 8192, "gemma-3-270m": 18432}
"""Tokens of one window of the encyclopedia, for figures by position."""
LONG_FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4")


def measure(folder: Path, name: str, tokens: int, chunk_size: int) -> list[dict[str, Any]]:
    """Every format and recipe on one model, in step."""
    path = model_folder(folder, name)
    model = load_model(path, dtype="float32")
    tokenizer = load_tokenizer(path)
    windows = []
    for text in texts(folder).values():
        windows += text_windows(tokenizer, [text], WINDOW, tokens)[0]
    results = evaluate_perplexity(
        model, windows, FORMATS, chunk_size, tokenizer=tokenizer, kv_recipes=RECIPES
    )
    # Both formats of NVFP4 are the same under a recipe that chooses scales by itself.
    return [
        asdict(result)
        for result in results
        if result.kv_cache_dtype != "nvfp4_4over6" or result.kv_recipe == "plain"
    ]


def measure_long(folder: Path, name: str) -> list[dict[str, Any]]:
    """By position in one long window."""
    path = model_folder(folder, name)
    model = load_model(path, dtype="float32")
    tokenizer = load_tokenizer(path)
    text, length = texts(folder)["encyclopedia"], LONG[name]
    windows, _ = text_windows(tokenizer, [text], length, length)
    results = evaluate_perplexity(
        model, windows[:1], LONG_FORMATS, 128, tokenizer=tokenizer, kv_recipes=RECIPES
    )
    return [asdict(result) for result in results]


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
            baseline = row["nll"] - row["nll_increase"]
            lines.append(
                f"| {name} | {_label(row)} | {row['nll_increase'] / baseline:+.2%} "
                f"± {row['nll_increase_stderr'] / baseline:.2%} | {row['kl_divergence']:.4f} "
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
                lines.append(f"| {_label(row)} | {figures} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _label(row: dict[str, Any]) -> str:
    recipe = NAMES.get(row["kv_recipe"], row["kv_recipe"])
    return f"`{row['kv_cache_dtype']}`" + ("" if recipe == "plain" else f", {recipe}")


def write_tables(report: dict[str, Any]) -> None:
    """Put the tables between their markers in README.md and docs/accuracy.md."""
    made = {"real-models": table(report), "by-position": table_by_position(report)}
    for page in PAGES:
        text = page.read_text()
        for name, content in made.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            if begin in text:
                before, rest = text.split(begin)
                text = before + begin + content + end + rest.split(end)[1]
        page.write_text(text)


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="for models and texts, some 900 MB")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--chunk-size", type=int, default=512)
    arguments = parser.parse_args()
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "tokens_of_each_text": arguments.tokens,
        "chunk_size": arguments.chunk_size,
        "window": WINDOW,
        "models": {
            name: measure(arguments.folder, name, arguments.tokens, arguments.chunk_size)
            for name in MODELS
        },
        "long": {name: measure_long(arguments.folder, name) for name in MODELS},
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    write_tables(report)
    print(table(report))
    print(table_by_position(report))


if __name__ == "__main__":
    main()
