"""`halfbyte info`"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from halfbyte import __version__
from halfbyte.cli.console import out

if TYPE_CHECKING:
    from halfbyte.dispatch import Verdict

_PACKAGES = ("torch", "transformers", "safetensors", "triton", "numpy")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The machine, versions, cache formats, and which backends can run here and why."""
    report = _collect()
    if as_json:
        print(json.dumps(report))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for section in ("machine", "versions"):
        for name, value in report[section].items():
            table.add_row(name, str(value))
    out.print(table)
    out.print()
    formats = Table("KV cache dtype", "bits/value", "scales", box=None, pad_edge=False)
    for row in report["kv_cache_dtypes"]:
        formats.add_row(row["name"], f"{row['bits_per_value']:g}", row["scales"])
    out.print(formats)
    out.print()
    out.print(_backends("store backend", report["store_backends"]))
    out.print()
    out.print(_backends("attention backend", report["attention_backends"]))
    out.print()
    out.print(_backends("linear backend", report["linear_backends"]))
    out.print()
    out.print(_backends("MoE backend", report["moe_backends"]))


def _backends(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title, "usable", "why", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["name"], "yes" if row["supported"] else "no", row["reason"])
    return table


def _collect() -> dict[str, Any]:
    import torch

    from halfbyte.attention import ATTENTION_BACKENDS
    from halfbyte.dispatch import current_compute_capability
    from halfbyte.kvcache import STORE_BACKENDS
    from halfbyte.linear import LINEAR_BACKENDS
    from halfbyte.measure.machine import machine, package_version
    from halfbyte.moe import MOE_BACKENDS

    found = machine(torch.device("cuda" if current_compute_capability() else "cpu"))
    return {
        "machine": found | {"cpu_kernels": found["cpu_kernels"] or "not built"},
        "versions": {"halfbyte": __version__, **{x: package_version(x) for x in _PACKAGES}},
        "kv_cache_dtypes": _formats(),
        "store_backends": _verdicts(STORE_BACKENDS.explain()),
        "attention_backends": _verdicts(ATTENTION_BACKENDS.explain()),
        "linear_backends": _verdicts(LINEAR_BACKENDS.explain()),
        "moe_backends": _verdicts(MOE_BACKENDS.explain()),
    }


def _verdicts(verdicts: "list[Verdict]") -> list[dict[str, Any]]:
    return [{"name": v.name, "supported": v.usable, "reason": v.reason} for v in verdicts]


def _formats() -> list[dict[str, Any]]:
    from halfbyte.layouts import KVCacheDType

    rows = []
    for dtype in KVCacheDType:
        if dtype is KVCacheDType.AUTO:
            continue
        # Bits per value for a head size of 128.
        bits = (dtype.data_bytes(128) + dtype.scale_bytes(128)) * 8 / 128
        scales = [f"one per {dtype.scale_block_size}"] if dtype.scale_block_size else []
        scales += ["one per layer"] if dtype.has_global_scale else []
        rows.append(
            {"name": dtype.value, "bits_per_value": bits, "scales": ", ".join(scales) or "none"}
        )
    return rows
