"""Reports of the linear benchmark: on the terminal and in Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.linear_layers.ratios import DENSE, TIMINGS, ours, time_of

Row = dict[str, Any]
Report = dict[str, Any]
_HEADINGS = {"single": "single", "back_to_back": "in a row", "in_graph": "in a graph"}
_SHOWN_ROWS = (1, 16, 64, 256, 1024, 4096)
"""Values of M in the Markdown table, if the report has any of them."""


def linear_tables(report: Report) -> Iterator[Table]:
    """A table per shape, in µs of the first timing of `judged_by`; then a table of the bounds."""
    rows, timing = report["microseconds"], report["judged_by"][0]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        chosen = [row for row in rows if row["shape"] == shape]
        names = list(dict.fromkeys(name for row in chosen for name in row["contenders"]))
        table = Table(box=None, pad_edge=False)
        table.add_column(shape, justify="right", no_wrap=True)
        for heading in [*names, "selected", "/ fastest", "/ dense"]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in chosen:
            over = row[timing]
            table.add_row(
                f"M {row['m']}",
                *(_microseconds(row["contenders"].get(name, {}), timing) for name in names),
                row["selected"],
                _ratio(over["selected_over_fastest"]),
                _ratio(over["selected_over_dense"]),
            )
        yield table
    if report["bounds"]:
        yield _bounds_table(report["bounds"], report["judged_by"])


def _bounds_table(bounds: list[Row], judged_by: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    timed = [name for name in TIMINGS if any(bound[name]["m"] for bound in bounds)]
    others = [name for name in timed if name not in judged_by]
    for heading in ("must hold", "", ""):
        table.add_column(heading, no_wrap=True)
    for timing in judged_by:
        table.add_column(f"worst {_HEADINGS[timing]}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for timing in others:
        table.add_column(f"({_HEADINGS[timing]})", justify="right", no_wrap=True)
    words = {True: "holds", False: "BROKEN", None: "not measured"}
    for bound in bounds:
        table.add_row(
            bound["meaning"],
            bound["shape"],
            bound["rows"],
            *(_worst(bound[timing]) for timing in judged_by),
            words[bound["holds"]],
            *(_worst(bound[timing]) for timing in others),
        )
    return table


def _worst(found: Row) -> str:
    return f"{_ratio(found['worst'])} (M {found['m']})" if found["m"] else ""


def _microseconds(entry: Row, timing: str) -> str:
    if "failed" in entry:
        return "failed"
    return f"{entry[timing]:,.1f}{_mark(entry)}" if timing in entry else ""


def _mark(entry: Row) -> str:
    """Marks a peer whose error exceeds the allowed one."""
    return "*" if entry.get("inexact") else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def linear_markdown_table(report: Report) -> str:
    """halfbyte, Humming, bfloat16 weights and a plain read, by the timing that bounds use.

    A star marks a peer whose error exceeds the allowed one.
    """
    lines = [
        "| weights N x K | tokens (M) | halfbyte | Humming | bf16 weights | halfbyte / Humming "
        "| halfbyte / bf16 | of a plain read |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows, timing = report["microseconds"], report["judged_by"][0]
    shown = [row for row in rows if row["m"] in _SHOWN_ROWS] or rows
    for row in shown:
        names = (ours(row), "humming", DENSE)
        times = [(time_of(row, name, timing), row["contenders"].get(name, {})) for name in names]
        over = row[timing]
        share = over["ours_of_read"]
        cells = [
            f"{row['n']:,} x {row['k']:,}",
            f"{row['m']:,}",
            *("" if time is None else _rounded(time) + _mark(entry) for time, entry in times),
            _ratio(over["ours_over_humming"]),
            _ratio(over["ours_over_dense"]),
            "" if share is None else f"{share:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rounded(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs" if microseconds < 100 else f"{microseconds:,.0f} µs"
