"""NVFP4 linear layers, Humming and bfloat16 weights: the run, and its table.

    python -m benchmarks.linear [--out FILE] [--shapes 6144x4096] [--m 1,16]
    python -m benchmarks.linear --table

The first measures (on a GPU preferably with `pip install humming-kernels[cu13]`), writes the JSON
after every case, and exits with 1 if halfbyte failed or any result was wrong. The second prints the
table of the JSON in Markdown and writes it between the `linear` markers of docs/numbers/linear.md.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.linear_layers.run import GPU_TOKENS, LinearRun, usable_backends
from benchmarks.linear_layers.table import linear_markdown_table, linear_tables, to_json
from benchmarks.linear_layers.warm_up import KEPT_ON_DISK, warm_up
from benchmarks.pages import put_table
from halfbyte.bench.linear import SHAPES
from halfbyte.cli.bench import parse_shapes

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "linear.json"
PAGE = REPOSITORY / "docs" / "numbers" / "linear.md"
TABLE = "linear"
"""Its name in the page."""
table = linear_markdown_table


def measure(run: LinearRun, out: Path) -> None:
    """Measure, print tables and failures; SystemExit if halfbyte failed or a result was wrong."""
    for _ in run.run():
        out.write_text(to_json(run.report))
    console = Console(highlight=False, soft_wrap=True, width=130)
    for each in linear_tables(run.report):
        console.print(each)
    for line in run.failures():
        print(line, file=sys.stderr)
    if run.failures(ours=True):
        sys.exit(1)


def write_table(report: Path) -> None:
    """Print the table of a run, and write it into its page."""
    text = table(json.loads(report.read_text()))
    put_table(PAGE, TABLE, text)
    print(text, end="")


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--shapes", type=parse_shapes, default=(), help="N x K, by commas")
    parser.add_argument("--m", type=_numbers, default=(), help="numbers of tokens, by commas")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--warm-up", action="store_true", help="compile what backends keep on disk; measure nothing"
    )
    arguments = parser.parse_args()
    if arguments.table:
        write_table(arguments.out)
        return
    device = torch.device(arguments.device)
    if arguments.warm_up:  # before LinearRun, which measures bandwidth
        backends = arguments.backends or usable_backends(device)
        kept = [name for name in KEPT_ON_DISK if name in backends]
        shapes, tokens = arguments.shapes or SHAPES[device.type], arguments.m or GPU_TOKENS
        warm_up(shapes, tokens, kept, device, torch.bfloat16)
        return
    measure(LinearRun(device, arguments.shapes, arguments.m, arguments.backends), arguments.out)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
