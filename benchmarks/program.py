"""What programs that measure cases one by one share: the run on the command line, JSON, tables."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.linear_layers.ratios import OURS
from benchmarks.pages import put_table

Report = dict[str, Any]
WRONG = "wrong results"
"""Begins the reason of an entry whose error is not allowed."""


class Run(Protocol):
    """A benchmark whose `report` has a row in `microseconds` for every case measured so far."""

    report: Report

    def run(self) -> Iterator[Report]:
        """Measure all cases; yields each row after adding it to the report."""


def measure(
    run: Run, out: Path, tables: Callable[[Report], Iterator[Table]], *, width: int
) -> None:
    """Measure, write the JSON after every case, print tables and failures.

    Raises:
        SystemExit: with status 1, if halfbyte failed or a result was wrong.
    """
    for row in run.run():
        out.write_text(to_json(run.report))
        print(f"{run.report['seconds']:.0f} s: {row['shape']} M={row['m']}", file=sys.stderr)
    console = Console(highlight=False, soft_wrap=True, width=width)
    for each in tables(run.report):
        console.print(each)
    for line in failures(run.report):
        print(line, file=sys.stderr)
    if failures(run.report, ours=True):
        sys.exit(1)


def failures(report: Report, *, ours: bool = False) -> list[str]:
    """One line per failed measurement; with `ours` only halfbyte's and wrong results."""
    return [
        f"{row['shape']} M={row['m']}: {name}: {entry['failed']}"
        for row in report["microseconds"]
        for name, entry in row["contenders"].items()
        if "failed" in entry
        and (not ours or name in (*OURS, "reference") or WRONG in entry["failed"])
    ]


def write_table(report: Path, page: Path, name: str, table: Callable[[Report], str]) -> None:
    """Print the table of a run, and write it between a page's markers of that name."""
    text = table(json.loads(report.read_text()))
    put_table(page, name, text)
    print(text, end="")


def to_json(report: Report) -> str:
    """Indented JSON, with innermost objects on one line."""
    text = json.dumps(report, indent=1)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), text) + "\n"


def numbers(text: str) -> list[int]:
    """Numbers of an option, by commas."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Names of an option, by commas; none for an empty text."""
    return [part.strip() for part in text.split(",") if part.strip()]
