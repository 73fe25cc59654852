"""What NVFP4 weights cost real models, by method and recipe: JSON of the run, and a table.

    python -m benchmarks.weight_rounding MODELS [--model SmolLM2-135M-Instruct]

`halfbyte quantize` writes each checkpoint (W4A16), and the beginnings of the same texts as in
`kv_recipes` are predicted in windows of 2,048 tokens with a bfloat16 cache, so that weights alone
differ. `gptq` is calibrated on the built-in text.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kv_recipe_tables import of_baseline
from benchmarks.pages import put_table
from benchmarks.provenance import provenance
from benchmarks.real_models import MODELS, model_folder, windows_of_texts
from halfbyte import load_model
from halfbyte.evaluation import evaluate_perplexity
from halfbyte.models import load_tokenizer
from halfbyte.quantization import quantize_checkpoint

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "weight_rounding.json"
PAGE = REPOSITORY / "docs" / "accuracy.md"
TABLE = "weight-rounding"
CASES = (
    ("rtn", "amax6"),
    ("rtn", "four_over_six"),
    ("gptq", "amax6"),
    ("gptq", "four_over_six"),
)
"""Method and recipe."""
WINDOW = 2048


def measure(folder: Path, name: str, tokens: int) -> list[dict[str, Any]]:
    """All cases on one model."""
    source = model_folder(folder, name)
    tokenizer = load_tokenizer(source)
    windows = windows_of_texts(folder, tokenizer, WINDOW, tokens)

    def nll(path: Path) -> float:
        model = load_model(path, dtype="float32")
        return evaluate_perplexity(model, windows, ["bfloat16"], tokenizer=tokenizer)[0].nll

    baseline = nll(source)
    rows: list[dict[str, Any]] = []
    for method, recipe in CASES:
        with tempfile.TemporaryDirectory() as target:
            begin = time.monotonic()
            report = quantize_checkpoint(
                source,
                Path(target) / "checkpoint",
                dialect="compressed-tensors",
                weights="nvfp4-a16",
                recipe=recipe,
                method=method,
            )
            seconds = time.monotonic() - begin
            found = nll(Path(target) / "checkpoint")
        rows.append(
            {
                "method": method,
                "recipe": recipe,
                "calibration": report.calibration,
                "sqnr_db": report.mean_sqnr_db,
                "nll": found,
                "nll_increase": found - baseline,
                "seconds": seconds,
            }
        )
        print(f"{name} {method} {recipe}: {found / baseline - 1:+.2%}", flush=True)
    return rows


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| model | method | recipe | calibration | SQNR of weights | change in NLL |",
        "|---|---|---|---|---:|---:|",
    ]
    for name, rows in report["models"].items():
        lines += [
            f"| {name} | {row['method']} | `{row['recipe']}` | {row['calibration'] or ''} "
            f"| {row['sqnr_db']:.1f} dB "
            f"| {of_baseline(row):+.2%} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="for models and texts")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--tokens", type=int, default=WINDOW, help="of each text")
    parser.add_argument("--model", choices=list(MODELS), help="by default all")
    arguments = parser.parse_args()
    models = list(MODELS) if arguments.model is None else [arguments.model]
    report = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"models": {}}
    for name in models:
        report["models"][name] = measure(arguments.folder, name, arguments.tokens)
    report |= {
        **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "tokens_of_each_text": arguments.tokens,
        "window": WINDOW,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    put_table(PAGE, TABLE, table(report))
    print(table(report))


if __name__ == "__main__":
    main()
