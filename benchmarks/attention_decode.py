"""Attention of halfbyte, FlashInfer and SDPA: the run, and the docs' table and picture.

    python -m benchmarks.attention_decode --measure [--only decode-llama] [--out FILE]
    python -m benchmarks.attention_decode

The first measures, on a GPU with FlashInfer installed, and writes the JSON after every case; the
second writes table and picture from it.
"""

import argparse
import json
import re
from pathlib import Path

import torch

from benchmarks.attention.cases import CASES
from benchmarks.attention.picture import draw
from benchmarks.attention.run import AttentionRun
from benchmarks.attention.table import markdown_table
from benchmarks.pages import put_table
from halfbyte.measure.report import contenders

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "attention_decode.json"
PAGE = REPOSITORY / "docs" / "numbers" / "attention.md"
PICTURE = REPOSITORY / "docs" / "attention_decode.svg"
TABLE = "decode"
"""Its name in the page."""
FORMATS = ("nvfp4", "fp8", "bfloat16")
table = markdown_table


def measure(device: torch.device, only: str, out: Path) -> None:
    """Measure the cases whose name matches."""
    run = AttentionRun(device, FORMATS)
    for case in CASES:
        if re.search(only, case.name):
            entries = contenders(run.run(case))
            times = {name: entry.get("single", "failed") for name, entry in entries.items()}
            print(case.name, times, flush=True)
            out.write_text(json.dumps(run.report, indent=2) + "\n")


def main() -> None:
    """Measure, or write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", default="", help="regular expression for names of cases")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(torch.device(arguments.device), arguments.only, arguments.out)
        return
    report = json.loads(arguments.out.read_text())
    put_table(PAGE, TABLE, table(report))
    draw(report, PICTURE)


if __name__ == "__main__":
    main()
