"""Prefill of nvfp4 on one GPU by each variant of `dense`: the data behind its selection.

    python -m benchmarks.prefill_variants [--out benchmarks/results/prefill_variants.json]

`sm90` is halfbyte's kernel for SM90 on unpacked K and V, `own` the one in Triton, `pytorch`
PyTorch's dense attention, `general` the Triton kernel that unpacks on the fly; unsupported variants
are omitted. Times are those of
`benchmarks.timing`: CUDA graphs of one complete call without planning. Variants are interleaved.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.provenance import provenance
from benchmarks.timing import measure_in_turns, ready
from halfbyte.attention.prefill import plan as dense_plan
from halfbyte.attention.prefill.sm90 import launcher as sm90
from halfbyte.bench.attention_calls import attention_calls
from halfbyte.bench.cases import Case
from halfbyte.bench.data import make_inputs

RESULT = Path(__file__).parent / "results" / "prefill_variants.json"
ALWAYS = 2**60
OWN: dict[str, Any] = {
    "MIN_PAIRS": ALWAYS,
    "MIN_CHUNK": 1,
    "MAX_KEYS_PER_QUERY": ALWAYS,
    "MIN_GENERAL_HEADS": ALWAYS,
}
VARIANTS = {
    "sm90": {**OWN, "MIN_SM90_TILES": 1},
    "own": OWN,
    "pytorch": {"MIN_PAIRS": 0, "MIN_QUERIES": 9, "MIN_HEAD_SIZE": 16, "MIN_CHUNK": 9},
    "general": {},
}
_BUDGET_US = 4e4


class Prefill(NamedTuple):
    """`new` tokens per sequence, after `cached` earlier ones."""

    kv_heads: int
    group: int
    head_size: int
    batch: int
    new: int
    cached: int
    window: int | None = None
    softcap: float | None = None

    def variants(self) -> list[str]:
        """Variants that support the case and may be the fastest."""
        hides = self.window is not None and self.window < self.cached + self.new
        plain = self.softcap is None and not hides
        return [
            *(["sm90"] if plain and self.head_size in (64, 128) else []),
            "own",
            *(["pytorch"] if plain and self.new >= 128 else []),
            *(["general"] if not plain or (self.cached and self.new < 512) else []),
        ]


_NO_PREFIX = ((1, 512), (2, 512), (3, 512), (4, 512), (16, 512), (1, 1024), (2, 1024), (4, 1024))
_LONGER = ((1, 1280), (1, 1536), (1, 2048), (4, 2048), (3, 700), (8, 700), (4, 256), (16, 256))
_SHORT = ((16, 128),)
_PREFIXES = (
    *((1, 512, 4096), (1, 512, 16384), (4, 512, 8192), (4, 256, 8192), (1, 256, 32768)),
    *((1, 128, 8192), (1, 128, 32768), (8, 128, 2048), (1, 96, 8192), (1, 64, 2048), (1, 64, 8192)),
    *((4, 64, 2048), (16, 64, 1024), (8, 64, 512), (1, 32, 1024), (8, 32, 1024), (32, 32, 512)),
    *((1, 32, 4096), (1, 32, 16384), (1, 16, 512), (8, 16, 512), (32, 16, 512), (1, 16, 1024)),
    *((32, 16, 1024), (1, 16, 2048), (8, 16, 2048), (1, 16, 4096)),
)
CASES = (
    *(Prefill(8, 4, 128, batch, new, 0) for batch, new in (*_NO_PREFIX, *_LONGER, *_SHORT)),
    *(Prefill(8, 4, 128, *sizes) for sizes in _PREFIXES),
    *(Prefill(8, 8, 64, *x, 0) for x in ((1, 1024), (1, 4096), (4, 2048), (16, 512), (1, 8192))),
    Prefill(8, 8, 64, 1, 2048, 16384),
    *(Prefill(8, 4, 256, *sizes, 0) for sizes in ((1, 1024), (1, 4096), (4, 2048), (16, 512))),
    *(Prefill(8, 4, d, *sizes, 0) for d in (80, 96) for sizes in ((4, 2048), (1, 1024))),
    *(Prefill(8, 4, 128, 1, 16384, 0, window) for window in (1024, 4096)),
    Prefill(8, 4, 128, 4, 2048, 8192, 2048),
    Prefill(8, 8, 64, 4, 2048, 0, 128),
    Prefill(8, 8, 64, 1, 16384, 0, 128),
    Prefill(8, 4, 64, 4, 64, 2048, 128),
    Prefill(8, 4, 256, 1, 8192, 0, 1024),
    Prefill(8, 4, 128, 4, 2048, 0, None, 30.0),
    Prefill(8, 4, 256, 1, 8192, 0, 4096, 50.0),
)


def measure(case: Prefill, device: torch.device, variants: Sequence[str]) -> dict[str, Any]:
    """A row of the report: the case, and µs by variant."""
    sizes = Case(
        name="",
        kind="prefill",
        batch=case.batch,
        context=case.cached + case.new,
        query_tokens=case.new,
        kv_heads=case.kv_heads,
        group=case.group,
        head_size=case.head_size,
        block_size=16,
        sliding_window=case.window,
    )
    inputs = make_inputs(sizes, "nvfp4", device)
    calls, contenders = {}, {}
    for variant in variants:
        backend = "triton" if variant == "general" else None
        # Keep the calls: graphs use the plans' tensors without a reference to them.
        calls[variant] = attention_calls(sizes, inputs, backend=backend, softcap=case.softcap)[:2]
        supports = sm90.supports if variant == "sm90" else lambda inputs: False
        with (
            patch.dict(vars(dense_plan), VARIANTS[variant]),
            patch.object(sm90, "supports", supports),
        ):
            contenders[variant] = ready(calls[variant], device)
    times = measure_in_turns(contenders, device, rounds=2, budget_us=_BUDGET_US)
    return {**case._asdict(), **{variant: times[variant] for variant in contenders}}


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    report: dict[str, Any] = {
        **provenance(device),
        "microseconds": [],
    }
    for case in CASES:
        row = measure(case, device, case.variants())
        report["microseconds"].append(row)
        print(*case, {variant: row[variant]["single"] for variant in case.variants()}, flush=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
