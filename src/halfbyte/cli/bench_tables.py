"""Tables of `halfbyte bench` reports, at most 90 columns wide, and their failures."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

if TYPE_CHECKING:
    from halfbyte.measure.report import Report, Row

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "single": ("single µs", "{:,.1f}".format),
    "back_to_back": ("in a row µs", "{:,.1f}".format),
    "terabytes_per_s": ("GB/s", lambda rate: f"{rate * 1e3:,.1f}"),
    "fraction": ("of peak", "{:.0%}".format),
    "teraflops_per_s": ("TFLOP/s", "{:,.2f}".format),
    "error": ("error", "{:.1e}".format),
}
"""Heading and number format, by name in the report."""


def tables(report: "Report") -> Iterator[Table]:
    """One table per kind of case, or per shape of weights, without columns that are all empty."""
    from halfbyte.measure.report import contenders

    kinds: dict[str, list[Row]] = {}
    for row in report["microseconds"]:
        kinds.setdefault(row.get("kind") or row["shape"], []).append(row)
    for kind, rows in kinds.items():
        entries = [entry for row in rows for entry in contenders(row).values()]
        shown = [name for name in _COLUMNS if any(name in entry for entry in entries)]
        table = Table(box=None, pad_edge=False)
        for i, heading in enumerate([kind, "", *(_COLUMNS[name][0] for name in shown)]):
            table.add_column(heading, justify="right" if i > 1 else "left", no_wrap=True)
        for row in rows:
            label = row["name"].removeprefix(kind).strip("- ")
            for name, entry in contenders(row).items():
                cells = [_COLUMNS[x][1](entry[x]) if x in entry else "" for x in shown]
                table.add_row(label, name, *(["failed"] if "failed" in entry else cells))
                label = ""
        yield table


class Measurement(NamedTuple):
    """An entry of a report."""

    row: str
    contender: str


def failures(report: "Report") -> dict[Measurement, str]:
    """Errors of failed measurements."""
    from halfbyte.measure.report import contenders

    return {
        Measurement(row["name"], name): entry["failed"]
        for row in report["microseconds"]
        for name, entry in contenders(row).items()
        if "failed" in entry
    }
