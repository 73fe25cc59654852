"""4-bit experts of mixtures beside vLLM's, Humming's and OpenAI's kernels: the run, and its table.

    python -m benchmarks.moe [--out FILE] [--shapes qwen3-30b-a3b] [--m 1,16] [--peers humming]
    python -m benchmarks.moe --warm-up [--shapes gpt-oss-20b] [--peers humming]
    python -m benchmarks.moe --table

The first measures (on a GPU preferably with vLLM and `humming-kernels` installed), writes the JSON
after every case, and exits with 1 if halfbyte failed or any result was wrong. The second only
compiles what kernels keep on disk, for a run that has little time. The third prints the table of
the JSON in Markdown and writes it between the `moe` markers of docs/moe.md.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.linear_layers.table import to_json
from benchmarks.moe_layers.run import MoeRun
from benchmarks.moe_layers.table import moe_markdown_table, moe_tables
from benchmarks.pages import put_table
from halfbyte.cli.bench import parse_moe_shapes

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "moe.json"
PAGE = REPOSITORY / "docs" / "moe.md"
TABLE = "moe"
"""Its name in the page."""
table = moe_markdown_table


def measure(run: MoeRun, out: Path) -> None:
    """Measure, print tables and failures; SystemExit if halfbyte failed or a result was wrong."""
    for row in run.run():
        out.write_text(to_json(run.report))
        print(f"{run.report['seconds']:.0f} s: {row['name']}", file=sys.stderr)
    console = Console(highlight=False, soft_wrap=True, width=200)
    for each in moe_tables(run.report):
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
    parser.add_argument("--shapes", type=parse_moe_shapes, default=(), help="by commas")
    parser.add_argument("--m", type=_numbers, default=(), help="numbers of tokens, by commas")
    parser.add_argument("--backends", type=_names, default=(), help="ours, by commas")
    parser.add_argument("--peers", type=_names, default=None, help="by commas; '' for none")
    parser.add_argument("--warm-up", action="store_true", help="compile; measure nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.table:
        write_table(arguments.out)
        return
    run = MoeRun(
        torch.device(arguments.device),
        arguments.shapes,
        arguments.m,
        arguments.backends,
        arguments.peers,
    )
    if arguments.warm_up:
        run.warm_up()
    else:
        measure(run, arguments.out)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    main()
