"""Which backend is faster, where that was measured: a small committed table.

`measured.json` holds, per compute capability, times of backends by shape and number of rows, from
the committed run of `benchmarks/linear.py`, whose `--selection` writes it. A layer that knows its
number of rows (`m_hint`) asks here; one that does not takes the first backend that can do its work.
"""

import json
import math
from collections.abc import Collection
from functools import lru_cache
from importlib.resources import files
from typing import Any

from halfbyte.linear.base import NvFp4LinearLayerConfig

_CLEARLY = 1.1
"""So many times faster must another be to be taken instead."""
_NEAR = math.log(2.0)
"""Shapes and numbers of rows within a factor of two are judged by what was measured."""

Row = dict[str, Any]


def faster_backend(config: NvFp4LinearLayerConfig, default: str, usable: Collection[str]) -> str:
    """A usable backend that was measured to be clearly faster than the default, or the default.

    Args:
        config: the layer, whose `m_hint` says for how many rows of x.
        default: the backend that it would get otherwise.
        usable: names of the backends that can do the work.
    """
    if config.m_hint is None:
        return default
    times = _nearest(config.compute_capability, config.n, config.k, config.m_hint)
    known = {name: times[name] for name in usable if name in times}
    if default not in known:
        return default
    best = min(known, key=lambda name: known[name])
    return best if known[default] > _CLEARLY * known[best] else default


@lru_cache(maxsize=1024)
def _nearest(capability: int, n: int, k: int, m: int) -> dict[str, float]:
    """Times in µs by backend, of the measured case next to this one; none if all are far away."""
    wanted = (n, k, m)

    def distance(row: Row) -> float:
        return max(abs(math.log(row[name] / x)) for name, x in zip("nkm", wanted, strict=True))

    row = min(_table().get(str(capability), []), key=distance, default=None)
    return dict(row["microseconds"]) if row is not None and distance(row) <= _NEAR else {}


@lru_cache(maxsize=1)
def _table() -> dict[str, list[Row]]:
    table: dict[str, list[Row]] = json.loads(
        files(__package__).joinpath("measured.json").read_text()
    )
    return table
