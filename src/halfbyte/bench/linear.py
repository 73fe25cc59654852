"""The linear benchmark: NVFP4 weights on halfbyte's kernels, bfloat16 weights on PyTorch's."""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from halfbyte.bench.products import GLOBAL_SCALE, ProductBenchmark, RandomWeights
from halfbyte.dispatch import compute_capability_of
from halfbyte.linear import LINEAR_BACKENDS, NvFp4Linear, NvFp4LinearLayerConfig
from halfbyte.measure.report import Row
from halfbyte.measure.timing import Call, copies

Shape = tuple[int, int]
"""N output and K input features."""


class LinearWeights(RandomWeights):
    """A random NVFP4 weight of a `Shape`."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, shape[1], device, dtype)
        self.codes, self.scales = self.random_weight(*shape)

    def layer(self, backend: str) -> NvFp4Linear:
        """A layer with its weights in a backend's format."""
        n, k = self.shape
        layer = NvFp4Linear(k, n, bias=False, dtype=self.dtype, device=self.device, backend=backend)
        scale = torch.tensor(GLOBAL_SCALE, device=self.device)
        # Clones, because a backend may repack in place.
        tensors = {"weight": self.codes.clone(), "weight_scale": self.scales.clone()}
        layer.load_tensors({**tensors, "weight_scale_2": scale}, "modelopt")
        layer.process_weights_after_loading()
        return layer

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight `[N, K]`."""
        return self.dequantized(self.codes, self.scales, dtype)

    def calls(self, backend: str, x: torch.Tensor) -> list[Call]:
        """One call per copy of the layer."""
        count = copies(self.codes.nbytes + self.scales.nbytes, self.device)
        layers = self.prepared(backend, partial(self.layer, backend), count)
        return [partial(layer, x) for layer in layers]

    def dense_calls(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Call]:
        """PyTorch's product with each copy of the dequantized weight: on a GPU, cuBLAS."""
        count = copies(2 * self.codes.numel() * dtype.itemsize, self.device)
        weights = self.prepared(str(dtype), partial(self.dense, dtype), count)
        return [partial(F.linear, x.to(dtype), weight) for weight in weights]

    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product in float64, and with bfloat16 weights and x."""
        (exact,) = self.prepared("exact", partial(self.dense, torch.float64), 1)
        return x.double() @ exact.t(), F.linear(x.bfloat16(), self.dense(torch.bfloat16))


class LinearBenchmark(ProductBenchmark):
    """NVFP4 weights `(N, K)`, by `LINEAR_BACKENDS`; a row also has `n` and `k`."""

    registry, weights = LINEAR_BACKENDS, LinearWeights
    # On a GPU qkv, gate_up and down of Llama-3.1-8B.
    shapes: ClassVar = {
        "cuda": ((6144, 4096), (28672, 4096), (4096, 14336)),
        "cpu": ((2048, 2048), (1024, 4096)),
    }
    tokens: ClassVar = {"cuda": (1, 16, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64)}

    @staticmethod
    def config(
        shape: Shape, dtype: torch.dtype, device: torch.device, m: int | None = None
    ) -> NvFp4LinearLayerConfig:
        """The config of a layer; `m` is a hint."""
        kind, capability = device.type, compute_capability_of(device)
        return NvFp4LinearLayerConfig(
            *shape, dtype, m_hint=m, device_type=kind, compute_capability=capability
        )

    def fields(self, shape: Shape) -> Row:
        """`shape`, `n` and `k`."""
        n, k = shape
        return {"shape": f"{n}x{k}", "n": n, "k": k}
