"""4-bit experts of mixtures beside vLLM's, Humming's and OpenAI's kernels: the run, and its table.

    python -m benchmarks.moe [--out FILE] [--shapes qwen3-30b-a3b] [--m 1,16] [--peers humming]
    python -m benchmarks.moe --warm-up [--shapes gpt-oss-20b] [--peers humming]
    python -m benchmarks.moe --table

The first measures (on a GPU preferably with vLLM and `humming-kernels` installed), writes the JSON
after every case, and exits with 1 if halfbyte failed or any result was wrong. The second only
compiles what kernels keep on disk, for a run that has little time. The third prints the table of
the JSON in Markdown, writes it between the `moe` markers of docs/moe.md, and draws docs/moe.svg.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.moe_layers.picture import draw
from benchmarks.moe_layers.run import MoeRun
from benchmarks.moe_layers.table import moe_markdown_table, moe_tables
from benchmarks.program import measure, names, numbers, write_table
from halfbyte.cli.bench_arguments import parse_moe_shapes

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "moe.json"
PAGE = REPOSITORY / "docs" / "moe.md"
PICTURE = REPOSITORY / "docs" / "moe.svg"
TABLE = "moe"
"""Its name in the page."""
table = moe_markdown_table


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--shapes", type=parse_moe_shapes, default=(), help="by commas")
    parser.add_argument("--m", type=numbers, default=(), help="numbers of tokens, by commas")
    parser.add_argument("--backends", type=names, default=(), help="ours, by commas")
    parser.add_argument("--peers", type=names, default=None, help="by commas; '' for none")
    parser.add_argument("--warm-up", action="store_true", help="compile; measure nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.table:
        write_table(arguments.out, PAGE, TABLE, table)
        report = json.loads(arguments.out.read_text())
        if "cuda" in report["backends"]:
            draw(report, PICTURE)
        return
    try:
        run = MoeRun(
            torch.device(arguments.device),
            arguments.shapes,
            arguments.m,
            arguments.backends,
            arguments.peers,
        )
    except ValueError as error:
        parser.error(str(error))
    if arguments.warm_up:
        run.warm_up()
    else:
        measure(run, arguments.out, moe_tables, width=200)


if __name__ == "__main__":
    main()
