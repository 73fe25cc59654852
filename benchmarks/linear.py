"""NVFP4 linear layers, Humming and bfloat16 weights: the run, and its table.

    python -m benchmarks.linear [--out FILE] [--shapes 6144x4096] [--m 1,16]
    python -m benchmarks.linear --table

The first measures (on a GPU preferably with `pip install humming-kernels[cu13]`), writes the JSON
after every case, and exits with 1 if halfbyte failed or any result was wrong. The second prints the
table of the JSON in Markdown and writes it between the `linear` markers of docs/numbers/linear.md.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.linear_layers.run import GPU_TOKENS, LinearRun, usable_backends
from benchmarks.linear_layers.table import linear_markdown_table, linear_tables
from benchmarks.linear_layers.warm_up import KEPT_ON_DISK, warm_up
from benchmarks.program import measure, names, numbers, write_table
from halfbyte.cli.bench_arguments import parse_shapes

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "linear.json"
PAGE = REPOSITORY / "docs" / "numbers" / "linear.md"
TABLE = "linear"
"""Its name in the page."""
table = linear_markdown_table


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--shapes", type=parse_shapes, default=(), help="N x K, by commas")
    parser.add_argument("--m", type=numbers, default=(), help="numbers of tokens, by commas")
    parser.add_argument("--backends", type=names, default=())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--warm-up", action="store_true", help="compile what backends keep on disk; measure nothing"
    )
    arguments = parser.parse_args()
    if arguments.table:
        write_table(arguments.out, PAGE, TABLE, table)
        return
    device = torch.device(arguments.device)
    if arguments.warm_up:  # before LinearRun, which measures bandwidth
        backends = arguments.backends or usable_backends(device)
        kept = [name for name in KEPT_ON_DISK if name in backends]
        shapes, tokens = (
            arguments.shapes or LinearRun.shapes[device.type],
            arguments.m or GPU_TOKENS,
        )
        warm_up(shapes, tokens, kept, device, torch.bfloat16)
        return
    run = LinearRun(device, arguments.shapes, arguments.m, arguments.backends)
    measure(run, arguments.out, linear_tables, width=130)


if __name__ == "__main__":
    main()
