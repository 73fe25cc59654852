"""What the benchmarks of linear layers and of experts share: cases, backends, checked times."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from halfbyte.bench.report import Report, Row, new_report
from halfbyte.bench.timing import Call, measure
from halfbyte.dispatch import Registry

_OURS = ("cuda", "triton", "cpu")


class HasError(Protocol):
    """Random weights that know what a product with them should be."""

    def error(self, x: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
        """The error of a result, and the allowed error."""


class ProductBenchmark:
    """A benchmark of shapes of weights and numbers of tokens.

    Args:
        device: of the tensors.
        cases: shape and M of each row.
        registry: of the backends.
        configs: of the cases, which every requested backend must be able to run.
        backends: to measure; by default halfbyte's own that run here. NoImplementationError for an
            unknown one, or one that cannot run.
        dtype: of x.
    """

    def __init__(
        self,
        device: torch.device,
        cases: Iterable[tuple[Any, int]],
        registry: Registry[Any],
        configs: Sequence[Any],
        backends: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        self.device, self.dtype, self.cases = device, dtype, list(cases)
        for config in configs:
            for name in backends:
                registry.select(config, explicit=name)
        verdicts = registry.explain(configs[-1])
        ours = [v.name for v in verdicts if v.usable and v.name in _OURS]
        self.backends = list(dict.fromkeys(backends or ours or ["reference"]))
        self.report: Report = new_report(device)
        self.report |= {"dtype": str(dtype).removeprefix("torch."), "backends": self.backends}

    def checked(self, weights: HasError, x: torch.Tensor, make: "partial[list[Call]]") -> Row:
        """Times of calls, `error` and `allowed_error`; RuntimeError for a wrong result."""
        calls = make()
        error, allowed = weights.error(x, calls[0]())
        if not error <= allowed:  # also for NaN
            raise RuntimeError(f"wrong results: error {error:.3g}, allowed {allowed:.3g}")
        return {**measure(calls, self.device), "error": error, "allowed_error": allowed}


def grid(shapes: Iterable[Any], tokens: Iterable[int]) -> list[tuple[Any, int]]:
    """Every shape with every number of tokens, each once."""
    ms = list(dict.fromkeys(tokens))
    return [(shape, m) for shape in dict.fromkeys(shapes) for m in ms]
