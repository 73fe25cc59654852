"""What NVFP4 weights cost on the bundled model: JSON of the run, and a table of the docs.

    python -m benchmarks.weights [--out benchmarks/results/weights.json]

Each checkpoint is written by `halfbyte quantize` and measured by `halfbyte eval` on the held-out
text, with a bfloat16 and an nvfp4 cache. W4A4 is emulated where the machine has no FP4 arithmetic:
activations are rounded to the very codes and scales that hardware would compute. The KV scales are
those of the bundled model in every run. The table goes between the `weights` markers of
docs/numbers/bundled.md.
"""

import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bundled import halfbyte, measure
from halfbyte.assets import bundled_model_path

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "weights.json"
PAGE = REPOSITORY / "docs" / "numbers" / "bundled.md"
CACHES = ("bfloat16", "nvfp4")
EVAL = (
    *("--kv-cache-dtype", ",".join(CACHES), "--kv-recipe", "plain"),
    *("--chunk-size", "512", "--window", "2048"),
)
CASES = (
    ("bfloat16", None, None),
    ("W4A16", "nvfp4-a16", "four_over_six"),
    ("W4A16", "nvfp4-a16", "amax6"),
    ("W4A4", "nvfp4", "four_over_six"),
    ("W4A4", "nvfp4", "amax6"),
)
"""Name, and what `halfbyte quantize` is told as `--weights` and `--recipe`."""
TABLE = "weights"
"""Its name in the page."""


def run(max_tokens: int) -> dict[str, Any]:
    """The results, and what they were measured on."""
    info = halfbyte("info")
    arguments = (*EVAL, "--max-tokens", str(max_tokens))
    results = []
    for name, weights, recipe in CASES:
        print(f"{name} {recipe or ''}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            results.append(
                {
                    "weights": name,
                    "recipe": recipe,
                    **_measure(Path(folder) / "checkpoint", weights, recipe, arguments),
                }
            )
    return {
        "commands": [
            "halfbyte quantize BUNDLED CHECKPOINT --format modelopt --weights W --recipe R",
            "halfbyte eval --model CHECKPOINT " + " ".join(arguments),
            "with --quantize-activations for W4A4, and without --model for bfloat16 weights",
        ],
        "date": datetime.date.today().isoformat(),
        "machine": info["machine"],
        "versions": info["versions"],
        "results": results,
    }


def _measure(
    folder: Path, weights: str | None, recipe: str | None, arguments: tuple[str, ...]
) -> dict[str, Any]:
    if weights is None or recipe is None:
        source = bundled_model_path()
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        return {"bytes": size, "sqnr_db": None, "caches": halfbyte("eval", *arguments)}
    report = halfbyte(
        "quantize",
        str(bundled_model_path()),
        str(folder),
        *("--format", "modelopt", "--weights", weights, "--recipe", recipe),
    )
    if weights == "nvfp4":
        arguments = (*arguments, "--quantize-activations")
    return {
        "bytes": report["bytes"],
        "sqnr_db": report["mean_sqnr_db"],
        "caches": halfbyte("eval", "--model", str(folder), *arguments),
    }


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| weights | recipe | SQNR of weights | perplexity, bfloat16 cache | change in NLL "
        "| perplexity, nvfp4 cache | change in NLL |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    baseline = report["results"][0]["caches"][0]["nll"]
    for row in report["results"]:
        cells = [row["weights"], f"`{row['recipe']}`" if row["recipe"] else ""]
        cells.append("" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f} dB")
        for cache in row["caches"]:
            cells += [f"{cache['perplexity']:.3f}", f"{cache['nll'] / baseline - 1:+.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure(run, table, description=__doc__, result=RESULT, page=PAGE, name=TABLE)
