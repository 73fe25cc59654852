"""Random NVFP4 weights in every backend's format, and the error of products."""

from copy import deepcopy
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from halfbyte.bench.data import GLOBAL_SCALE, copies, relative_errors
from halfbyte.bench.timing import Call
from halfbyte.linear import NvFp4Linear
from halfbyte.numerics import nvfp4

Shape = tuple[int, int]
"""N output and K input features."""


class Weights:
    """A random weight: codes, and block scales between 0.25 and 4; `dtype` is the activations'."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        n, k = self.shape = shape
        self.device, self.dtype = device, dtype
        generator = torch.Generator(device).manual_seed(0)
        self.codes = torch.empty((n, k // 2), dtype=torch.uint8, device=device)
        self.codes.random_(0, 256, generator=generator)
        scales = torch.empty((n, k // 16), dtype=torch.uint8, device=device)
        self.scales = scales.random_(0x28, 0x48, generator=generator).view(torch.float8_e4m3fn)
        self._forms: dict[str | torch.dtype, list] = {}

    def x(self, m: int) -> torch.Tensor:
        """Random activations `[M, K]`."""
        generator = torch.Generator(self.device).manual_seed(m)
        x = torch.randn((m, self.shape[1]), generator=generator, device=self.device)
        return x.to(self.dtype)

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

    def layer_calls(self, backend: str, x: torch.Tensor) -> list[Call]:
        """One call per copy of the layer."""
        if backend not in self._forms:
            layer = self.layer(backend)
            count = copies(sum(p.nbytes for p in layer.parameters()), self.device)
            self._forms[backend] = [layer, *(deepcopy(layer) for _ in range(count - 1))]
        return [partial(layer, x) for layer in self._forms[backend]]

    def dense_calls(self, dtype: torch.dtype, x: torch.Tensor) -> list[Call]:
        """PyTorch's product with each copy of the dequantized weight: on a GPU, cuBLAS."""
        if dtype not in self._forms:
            weight = self.dense(dtype)
            count = copies(weight.nbytes, self.device)
            self._forms[dtype] = [weight, *(weight.clone() for _ in range(count - 1))]
        return [partial(F.linear, x.to(dtype), weight) for weight in self._forms[dtype]]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight `[N, K]`."""
        scale = torch.tensor(GLOBAL_SCALE, device=self.device)
        parts = zip(self.codes.split(1024), self.scales.split(1024), strict=True)  # bounds memory
        return torch.cat([nvfp4.dequantize(*part, scale, dtype) for part in parts])

    @cached_property
    def _exact(self) -> torch.Tensor:
        return self.dense(torch.float64)

    def error(self, x: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
        """Error of a product, and the allowed error; see `relative_errors`."""
        exact = x.double() @ self._exact.t()
        baseline = F.linear(x.bfloat16(), self.dense(torch.bfloat16))
        return relative_errors(exact, out, baseline)
