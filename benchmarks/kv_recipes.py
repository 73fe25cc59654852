"""What formats and recipes of the KV cache cost on real models: JSON of the run, and tables.

    make accuracy

Each model (`real_models`) predicts the texts in windows of 2,048 tokens, run in chunks, so that
everything is read back from packed pages. Calibration uses the built-in text; nothing was tuned on
these texts.

    --only greedy,retrieval       measure only these parts, and keep the rest of the JSON
    --model SmolLM2-135M-Instruct measure only this model
    --recipe balanced,accurate    measure only these recipes, with and without the last tokens
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kv_recipe_plots import draw
from benchmarks.kv_recipe_tables import TABLES
from benchmarks.pages import put_table
from benchmarks.provenance import provenance
from benchmarks.real_models import MODELS, model_folder, texts, windows_of_texts
from halfbyte import load_model
from halfbyte.evaluation import (
    evaluate_greedy,
    evaluate_layers,
    evaluate_perplexity,
    evaluate_retrieval,
    make_context,
    text_windows,
)
from halfbyte.kvcache import KVRecipe
from halfbyte.models import load_tokenizer

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "kv_recipes.json"
PICTURES = REPOSITORY / "docs"
README, PAGE = REPOSITORY / "README.md", REPOSITORY / "docs" / "accuracy.md"
TABLE_OF_README = "real-models"
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4_4over6", "nvfp4")
BALANCED, ACCURATE = KVRecipe.parse("balanced"), KVRecipe.parse("accurate")
RECIPES = ("plain", BALANCED.of_pages, BALANCED, ACCURATE.of_pages, ACCURATE)
FOUR_OVER_SIX = KVRecipe(four_over_six=True)
"""`nvfp4` with this recipe is `nvfp4_4over6` with `plain`; its rows are renamed so."""
WINDOW = 2048
LONG = {"SmolLM2-135M-Instruct": 8192, "gemma-3-270m": 18432}
"""Tokens of a window of the encyclopedia, for figures by position."""
LONG_WINDOWS = 3
"""Windows of that length; 2,048 tokens of one alone vary by a third."""
PROMPT, NEW_TOKENS, PROMPTS_OF_TEXT = 192, 64, 16
"""Greedy continuations: tokens of a prompt, new tokens, prompts per text."""
CONTEXTS, CONTEXT_TOKENS, FACTS = 6, 1500, 10
"""Retrieval, for the model that answers questions."""
ANSWERS = "SmolLM2-135M-Instruct"
SMALL_CHUNK = 16
"""A second chunk size, measured on `ANSWERS`: results must not depend on it."""
LAYERS_WINDOW = 1024
"""Tokens of each text for the errors by layer."""
PARTS = ("models", "small_chunks", "layers", "long", "long_again", "greedy", "retrieval")


class Selection(NamedTuple):
    """What to measure: by default everything."""

    formats: tuple[str, ...] = ("bfloat16", "fp8_e4m3", "nvfp4")
    recipes: tuple[str | KVRecipe, ...] = RECIPES


def measure(
    folder: Path, name: str, selection: Selection, tokens: int, chunk_size: int
) -> list[dict[str, Any]]:
    """Every format and recipe on one model, on the same tokens."""
    path = model_folder(folder, name)
    model = load_model(path, dtype="float32")
    tokenizer = load_tokenizer(path)
    windows = windows_of_texts(folder, tokenizer, WINDOW, tokens)
    recipes = (FOUR_OVER_SIX, *RECIPES) if selection == Selection() else selection.recipes
    results = evaluate_perplexity(
        model, windows, selection.formats, chunk_size, tokenizer=tokenizer, kv_recipes=recipes
    )
    rows = [asdict(result) for result in results]
    for row in rows:
        if row["kv_recipe"] == FOUR_OVER_SIX.name:
            row |= {"kv_cache_dtype": "nvfp4_4over6", "kv_recipe": "plain"}
    return rows


def measure_layers(folder: Path, name: str, selection: Selection) -> list[dict[str, Any]]:
    """SQNR and errors of attention logits in each layer."""
    path = model_folder(folder, name)
    tokenizer = load_tokenizer(path)
    windows = windows_of_texts(folder, tokenizer, LAYERS_WINDOW, LAYERS_WINDOW)
    results = evaluate_layers(
        load_model(path, dtype="float32"),
        windows,
        selection.formats,
        tokenizer=tokenizer,
        kv_recipes=selection.recipes,
    )
    return [asdict(result) for result in results]


def measure_long_again(folder: Path, name: str, selection: Selection) -> list[dict[str, Any]]:
    """As `measure_long` in the next windows, of fp8 and of the recipes that are held against it."""
    recipes = tuple(recipe for recipe in (BALANCED, ACCURATE) if recipe in selection.recipes)
    chosen = Selection(("bfloat16", "fp8_e4m3", "nvfp4"), recipes)
    return [
        {**row, "window": window}
        for window in range(1, LONG_WINDOWS if recipes else 1)
        for row in measure_long(folder, name, chosen, window)
    ]


def measure_long(
    folder: Path, name: str, selection: Selection, window: int = 0
) -> list[dict[str, Any]]:
    """Results by position in one long window, by its number."""
    path = model_folder(folder, name)
    model = load_model(path, dtype="float32")
    tokenizer = load_tokenizer(path)
    text, length = texts(folder)["encyclopedia"], LONG[name]
    windows, _ = text_windows(tokenizer, [text], length, length * LONG_WINDOWS)
    results = evaluate_perplexity(
        model,
        [windows[window]],
        selection.formats,
        128,
        tokenizer=tokenizer,
        kv_recipes=selection.recipes,
    )
    return [asdict(result) for result in results]


def measure_greedy(folder: Path, name: str, selection: Selection) -> list[dict[str, Any]]:
    """Continuations of pieces of all texts."""
    path = model_folder(folder, name)
    tokenizer = load_tokenizer(path)
    prompts = []
    for text in texts(folder).values():
        pieces, _ = text_windows(tokenizer, [text], PROMPT, PROMPT * PROMPTS_OF_TEXT)
        prompts += [piece for piece in pieces if len(piece) == PROMPT][:PROMPTS_OF_TEXT]
    results = evaluate_greedy(
        load_model(path, dtype="float32"),
        prompts,
        NEW_TOKENS,
        selection.formats,
        tokenizer=tokenizer,
        kv_recipes=selection.recipes,
    )
    return [asdict(result) for result in results]


def measure_retrieval(folder: Path, name: str, selection: Selection) -> list[dict[str, Any]]:
    """Facts in the encyclopedia."""
    path = model_folder(folder, name)
    tokenizer = load_tokenizer(path)
    text = texts(folder)["encyclopedia"]
    contexts = [
        make_context(tokenizer, text, CONTEXT_TOKENS, FACTS, seed) for seed in range(CONTEXTS)
    ]
    results = evaluate_retrieval(
        load_model(path, dtype="float32"),
        contexts,
        selection.formats,
        tokenizer=tokenizer,
        kv_recipes=selection.recipes,
    )
    return [asdict(result) for result in results]


def _merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The earlier rows with those of NVFP4 replaced by new ones of the same recipe, or appended.

    Rows of other formats, with which they are compared, are kept from the earlier run if it has
    them.
    """
    had = {_place(row) for row in before if row["kv_cache_dtype"] != "nvfp4"}
    new = {_place(row): row for row in rows if _place(row) not in had}
    kept = [new.pop(_place(row), row) for row in before]
    return kept + list(new.values())


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kv_cache_dtype"], row["kv_recipe"], row.get("layer"), row.get("window")


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="for models and texts, some 900 MB")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, by commas")
    parser.add_argument("--recipe", help="recipes, by commas; by default all")
    parser.add_argument("--model", choices=list(MODELS), help="by default all")
    arguments = parser.parse_args()
    folder, parts = arguments.folder, arguments.only.split(",")
    selection = Selection()
    if arguments.recipe is not None:
        named = [KVRecipe.parse(name) for name in arguments.recipe.split(",")]
        recipes = tuple(r for recipe in named for r in (recipe.of_pages, recipe))
        selection = Selection(("bfloat16", "nvfp4"), recipes)
    models = list(MODELS) if arguments.model is None else [arguments.model]
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "models": lambda: {
            name: measure(folder, name, selection, arguments.tokens, arguments.chunk_size)
            for name in models
        },
        "small_chunks": lambda: {
            ANSWERS: measure(folder, ANSWERS, selection, arguments.tokens, SMALL_CHUNK)
        },
        "layers": lambda: {name: measure_layers(folder, name, selection) for name in models},
        "long": lambda: {name: measure_long(folder, name, selection) for name in models},
        "long_again": lambda: {
            name: measure_long_again(folder, name, selection) for name in models
        },
        "greedy": lambda: {name: measure_greedy(folder, name, selection) for name in models},
        "retrieval": lambda: {ANSWERS: measure_retrieval(folder, ANSWERS, selection)},
    }
    if unknown := set(parts) - set(ways):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    now = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    report: dict[str, Any] = {
        **now,
        "tokens_of_each_text": arguments.tokens,
        "chunk_size": arguments.chunk_size,
        "window": WINDOW,
    }
    is_whole = set(parts) == set(PARTS) and models == list(MODELS) and selection == Selection()
    if not is_whole:
        report = json.loads(arguments.out.read_text())
    for part in parts:
        of_part = report.setdefault(part, {})
        for name, rows in ways[part]().items():
            of_part[name] = (
                rows if selection == Selection() else _merged(of_part.get(name, []), rows)
            )
        if not is_whole:
            chosen = [word for word in (arguments.recipe, arguments.model) if word is not None]
            report.setdefault("measured_apart", {})[" of ".join([part, *chosen])] = now
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    put_table(README, TABLE_OF_README, TABLES[TABLE_OF_README](report))
    for name, table in TABLES.items():
        put_table(PAGE, name, table(report))
    draw(report, PICTURES)
    for table in TABLES.values():
        print(table(report))


if __name__ == "__main__":
    main()
