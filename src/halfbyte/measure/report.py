"""A benchmark report: a dict, written as JSON after every case."""

import datetime
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from halfbyte.layouts import KVCacheDType
from halfbyte.measure.machine import machine, versions
from halfbyte.measure.timing import bandwidths

Row = dict[str, Any]
Report = dict[str, Any]


def new_report(device: torch.device) -> Report:
    """A report without rows; `microseconds` gets one row per case."""
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
    """The function's measurement, or its error in one line, so that the run continues."""
    try:
        return measured()
    except Exception as error:  # kernels may raise any error
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    finally:
        gc.collect()
        with suppress(RuntimeError):  # after a fatal GPU error, every row reports it
            torch.cuda.empty_cache()


def bandwidth(num_bytes: int, microseconds: float, peak: float) -> Row:
    """Fields of a measurement: bytes moved, TB/s, and their fraction of `peak` TB/s."""
    rate = num_bytes / microseconds / 1e6
    return {
        "bytes": num_bytes,
        "terabytes_per_s": round(rate, 4),
        "fraction": round(rate / peak, 3),
    }


def contenders(row: Row) -> dict[str, Row]:
    """Measurements or errors of a row, by contender."""
    entries: Row = row.get("contenders") or row
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def short_name(dtype: str) -> str:
    """A format's name in reports: `nvfp4`, `fp8`, `bf16`."""
    name = KVCacheDType.parse(dtype).value
    names = {"fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(name, name)
