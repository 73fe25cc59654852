"""Accuracy of every cache format on the bundled model: JSON of the run, and a table of the docs.

    python -m benchmarks.accuracy [--out benchmarks/results/accuracy.json]

It runs `halfbyte eval` on the held-out text, in chunks of 512 tokens, and writes the table between
the `accuracy` markers of docs/numbers/bundled.md.
"""

import datetime
from pathlib import Path
from typing import Any

from benchmarks.bundled import halfbyte, measure

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "accuracy.json"
PAGE = REPOSITORY / "docs" / "numbers" / "bundled.md"
FORMATS = "bfloat16,fp8_e4m3,fp8_e5m2,nvfp4_4over6,nvfp4,fp4_block16,mxfp4"
ARGUMENTS = (
    *("--kv-cache-dtype", FORMATS, "--kv-recipe", "plain"),
    *("--chunk-size", "512", "--window", "2048"),
)
TABLE = "accuracy"
"""Its name in the page."""


def run(max_tokens: int) -> dict[str, Any]:
    """The results, machine and versions."""
    info = halfbyte("info")
    arguments = (*ARGUMENTS, "--max-tokens", str(max_tokens))
    return {
        "command": "halfbyte eval " + " ".join(arguments),
        "date": datetime.date.today().isoformat(),
        "machine": info["machine"],
        "versions": info["versions"],
        "results": halfbyte("eval", *arguments),
    }


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| KV cache | bytes per token | perplexity | change in NLL | KL to bf16 |",
        "|---|---:|---:|---:|---:|",
    ]
    baseline = report["results"][0]["nll"]
    for row in report["results"]:
        lines.append(
            f"| `{row['kv_cache_dtype']}` | {row['bytes_per_token']:,.0f} "
            f"| {row['perplexity']:.3f} | {row['nll'] / baseline - 1:+.2%} "
            f"| {row['kl_divergence']:.4f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure(run, table, description=__doc__, result=RESULT, page=PAGE, name=TABLE)
