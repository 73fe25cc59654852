"""NVFP4 linear layers beside Humming and bfloat16 weights: the run, and its table.

    python benchmarks/linear.py [--out benchmarks/results/linear.json] [--m 1,16] ...
    python benchmarks/linear.py --table
    python benchmarks/linear.py --selection

The first measures, on a GPU best with Humming installed (`pip install humming-kernels[cu13]`), and
writes the JSON; further options are those of `halfbyte bench linear`. The second prints the table
of the JSON in Markdown and puts it between the `linear` markers of docs/numbers/linear.md. The
third makes of the JSON what `halfbyte.linear.measured` chooses by.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from halfbyte.bench import linear_markdown_table
from halfbyte.cli import main as halfbyte

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "linear.json"
PAGE = REPOSITORY / "docs" / "numbers" / "linear.md"
SELECTION = REPOSITORY / "src" / "halfbyte" / "linear" / "measured.json"
CAPABILITIES = {"NVIDIA H200": "90"}
MARKERS = re.compile(r"(<!-- linear -->\n).*?(<!-- /linear -->)", re.DOTALL)
table = linear_markdown_table


def selection(report: dict[str, Any]) -> str:
    """Times of all backends that were exact, as JSON with a case per line.

    Humming's are left out: here it may split K, which it does not do in layers.
    """
    timing, cases = report["judged_by"][0], []
    for row in report["microseconds"]:
        times = {
            name: row["subjects"][name][timing]
            for name in report["backends"]
            if name not in ("reference", "humming")
            and timing in row["subjects"].get(name, {})
            and not row["subjects"][name].get("inexact")
        }
        case = {name: row[name] for name in ("n", "k", "m")} | {"microseconds": times}
        cases.append(json.dumps(case))
    return f'{{"{CAPABILITIES[report["gpu"]]}": [\n' + ",\n".join(cases) + "\n]}\n"


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--selection", action="store_true", help="write what the choice goes by")
    arguments, others = parser.parse_known_args()
    if arguments.selection:
        SELECTION.write_text(selection(json.loads(arguments.out.read_text())))
        return
    if not arguments.table:
        sys.argv = ["halfbyte", "bench", "linear", "--out", str(arguments.out), *others]
        halfbyte()
        return
    text = table(json.loads(arguments.out.read_text()))
    PAGE.write_text(MARKERS.sub(lambda found: found[1] + text + found[2], PAGE.read_text()))
    print(text, end="")


if __name__ == "__main__":
    main()
