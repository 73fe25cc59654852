"""The linear benchmark: NVFP4 weights on halfbyte's kernels, bfloat16 weights on PyTorch's."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from halfbyte.bench.products import ProductBenchmark, grid
from halfbyte.bench.report import Row, or_failed
from halfbyte.bench.weights import Shape, Weights
from halfbyte.dispatch import CPU, current_compute_capability
from halfbyte.linear import LINEAR_BACKENDS, NvFp4LinearLayerConfig

SHAPES: dict[str, Sequence[Shape]] = {
    "cuda": ((6144, 4096), (28672, 4096), (4096, 14336)),  # qkv, gate_up, down of Llama-3.1-8B
    "cpu": ((2048, 2048), (1024, 4096)),
}
TOKENS = {"cuda": (1, 16, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64)}


class LinearBenchmark(ProductBenchmark):
    """Measures every shape with every number of tokens, and collects `report`.

    A row has `name`, `shape`, `n`, `k`, `m` and under `subjects` by name: times, `error` and
    `allowed_error`, see `Weights.error`.

    Args:
        shapes: of weights, N x K; ValueError for an invalid one.
        tokens: M, each at least 1.
        backends: names of `LINEAR_BACKENDS`, by default halfbyte's own that run here;
            NoImplementationError for an unknown one, or one that cannot run.
        dtype: of x.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[Shape] = (),
        tokens: Sequence[int] = (),
        backends: Sequence[str] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        cases = grid(shapes or SHAPES[device.type], tokens or TOKENS[device.type])
        capability = current_compute_capability() if device.type == "cuda" else CPU
        (n, k), m = cases[-1]
        config = NvFp4LinearLayerConfig(
            n, k, dtype, m_hint=m, device_type=device.type, compute_capability=capability
        )
        super().__init__(device, cases, LINEAR_BACKENDS, [config], backends, dtype)

    def run(self) -> Iterator[Row]:
        """Measure all cases; yields each row after adding it to the report."""
        weights = None
        for (n, k), m in self.cases:
            if weights is None or weights.shape != (n, k):
                weights = Weights((n, k), self.device, self.dtype)
            x, shape = weights.x(m), f"{n}x{k}"
            calls = {b: partial(weights.layer_calls, b, x) for b in self.backends}
            calls["dense_bf16"] = partial(weights.dense_calls, torch.bfloat16, x)
            subjects = {b: or_failed(partial(self.checked, weights, x, calls[b])) for b in calls}
            row = {"name": f"{shape} M={m}", "shape": shape, "n": n, "k": k, "m": m}
            self.report["microseconds"].append(row := {**row, "subjects": subjects})
            yield row
