"""Shared by benchmarks of the bundled model: commands of halfbyte, JSON of a run, a docs table."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import put_table

Report = dict[str, Any]


def halfbyte(*arguments: str) -> Any:
    """The JSON that a halfbyte command prints."""
    command = [sys.executable, "-m", "halfbyte", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(
    run: Callable[[int], Report],
    table: Callable[[Report], str],
    *,
    description: str | None,
    result: Path,
    page: Path,
    name: str,
) -> None:
    """Parse the command line, measure, write the JSON and the table.

    Args:
        run: measures on a number of tokens.
        table: the report in Markdown.
        description: of the program; its first line is printed.
        result: where the JSON goes by default.
        page, name: where the table goes in the docs.
    """
    parser = argparse.ArgumentParser(description=description and description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=result)
    parser.add_argument("--max-tokens", type=int, default=65536, help="of held-out text")
    arguments = parser.parse_args()
    report = run(arguments.max_tokens)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    put_table(page, name, table(report))
    print(table(report))
