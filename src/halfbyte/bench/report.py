"""A report that grows case by case: a dict, as it is written to JSON."""

import datetime
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from halfbyte.bench.machine import machine, versions
from halfbyte.bench.timing import bandwidths

Row = dict[str, Any]
Report = dict[str, Any]


def new_report(device: torch.device) -> Report:
    """A report without rows; `microseconds` gets one per case."""
    read, copied = bandwidths(device)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "machine": machine(device),
        "versions": versions(),
        "read_terabytes_per_s": read,
        "copy_terabytes_per_s": copied,
        "microseconds": [],
    }


def or_failed(measured: Callable[[], Row]) -> Row:
    """What a function measures, or in one line why it failed, so that a run goes on."""
    try:
        return measured()
    except Exception as error:  # whatever a kernel may raise
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    finally:
        gc.collect()
        with suppress(RuntimeError):  # a GPU that failed for good says so in every row
            torch.cuda.empty_cache()


def contenders(row: Row) -> dict[str, Row]:
    """What was measured in a row, or why it failed, by name."""
    entries: Row = row.get("subjects") or row
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
