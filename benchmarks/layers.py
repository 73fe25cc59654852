"""What programs that time layers in CUDA graphs share: replays in turns, JSON, a table."""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from halfbyte.measure.timing import CYCLES_PER_US, Call, gpu_microseconds

Times = dict[str, float]
"""Microseconds per layer by way."""


def medians_in_turns(graphs: Mapping[str, Call], rounds: int, layers: int) -> Times:
    """Medians of replays in turns, of graphs of `layers` layers."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(gpu_microseconds([graph], 50 * CYCLES_PER_US) / layers)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def measure(
    doc: str | None,
    result: Path,
    measured: Callable[[torch.device], Iterable[tuple[str, Times]]],
) -> None:
    """Parse the command line, measure case by case, write the JSON, print a table.

    Args:
        doc: of the program.
        result: where the JSON goes unless `--out` says otherwise.
        measured: names and times of cases on a GPU, measured one by one.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--out", type=Path, default=result)
    out: Path = parser.parse_args().out
    device = torch.device("cuda")
    report: dict[str, Any] = {**provenance(device), "microseconds": {}}
    for name, times in measured(device):
        report["microseconds"][name] = times
        gc.collect()
        torch.cuda.empty_cache()
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["microseconds"]))


def table(rows: Mapping[str, Times]) -> str:
    """Microseconds per layer in Markdown."""
    heads = ["µs per layer", *next(iter(rows.values()))]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, times in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{us:.1f}" for us in times.values()) + " |")
    return "\n".join(lines)
