"""Date, machine and versions, recorded in every run."""

import datetime
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from halfbyte.measure.machine import machine, versions


def provenance(device: torch.device) -> dict[str, Any]:
    """`date`, `machine` and `versions`, the first fields of a report."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "versions": versions(),
    }


def earlier_results(
    file: Path, report: Mapping[str, Any], compared: Collection[str]
) -> dict[str, Any]:
    """`results` of an earlier run in a file, if it was measured under the same conditions.

    Args:
        file: of the earlier run; none if it does not exist.
        report: of this run.
        compared: fields that must have the same values in both.
    """
    before = json.loads(file.read_text()) if file.is_file() else {}
    same = before and all(before.get(name) == report[name] for name in compared)
    return before["results"] if same else {}
