"""What formats and recipes of the KV cache cost on real models: JSON of the run, and a table.

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
from halfbyte.bench.machine import versions
from halfbyte.evaluation import PerplexityResult, evaluate_perplexity, text_windows
from halfbyte.kvcache import KVRecipe
from halfbyte.models import load_tokenizer

RESULT = Path(__file__).parent / "results" / "kv_recipes.json"
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
    """The results in Markdown."""
    lines = [
        "| model | K/V cache | change in NLL | KL to bf16 | top-1 agreement |",
        "|---|---|---:|---:|---:|",
    ]
    for name, rows in report["models"].items():
        for fields in rows:
            row = PerplexityResult(**fields)
            if row.kv_cache_dtype == "bfloat16":
                continue
            baseline = row.nll - row.nll_increase
            recipe = NAMES.get(row.kv_recipe, row.kv_recipe)
            label = row.kv_cache_dtype + ("" if recipe == "plain" else f", {recipe}")
            lines.append(
                f"| {name} | {label} | {row.nll_increase / baseline:+.2%} "
                f"± {row.nll_increase_stderr / baseline:.2%} | {row.kl_divergence:.4f} "
                f"| {row.top1:.3f} |"
            )
    for name, rows in report["long"].items():
        ranges = [f"{2 * i}k to {2 * i + 2}k" for i in range(len(rows[0]["kl_by_position"]))]
        lines += ["", f"| KL, {name} | " + " | ".join(ranges) + " |"]
        lines.append("|---|" + "---:|" * len(ranges))
        for row in rows[1:]:
            recipe = NAMES.get(row["kv_recipe"], row["kv_recipe"])
            label = row["kv_cache_dtype"] + ("" if recipe == "plain" else f", {recipe}")
            figures = " | ".join(f"{x:.4f}" for x in row["kl_by_position"])
            lines.append(f"| {label} | {figures} |")
    return "\n".join(lines) + "\n"


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
        "machine": f"{torch.get_num_threads()} CPU threads",
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
    print(table(report))


if __name__ == "__main__":
    main()
