"""Date, machine and versions, recorded in every run."""

import datetime
from typing import Any

import torch

from halfbyte.bench.machine import machine, versions


def provenance(device: torch.device) -> dict[str, Any]:
    """`date`, `machine` and `versions`, the first fields of a report."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "versions": versions(),
    }
