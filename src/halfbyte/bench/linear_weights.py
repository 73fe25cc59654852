"""Random NVFP4 weights, in every form that takes part, and how far a product is from float64.

Zeros and data that fit the caches flatter: codes are random, block scales between 0.25 and 4, and
every form comes in enough copies to leave a GPU's L2.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from halfbyte.bench.data import GLOBAL_SCALE
from halfbyte.bench.linear_cases import Shape
from halfbyte.bench.processor import bytes_beyond_caches
from halfbyte.bench.timing import Call
from halfbyte.linear import NvFp4Linear
from halfbyte.linear.w4a16.humming import HummingKernel
from halfbyte.numerics import nvfp4

_ROTATED_BYTES = {"cuda": 200_000_000, "cpu": bytes_beyond_caches()}
"""Of a form's copies together: some times the L2 of the largest GPUs, twice a CPU's last cache."""
_MOST_COPIES = 32
_ROWS_AT_ONCE = 1024
"""Of x, for errors: bounds what float64 takes."""


class Errors(NamedTuple):
    """Largest errors over the largest value, all against float64."""

    of: dict[str, float]
    """By name; NaN if any value is."""
    bfloat16: float
    """Of PyTorch's product of bfloat16 x and dequantized bfloat16 weights."""

    @property
    def allowed(self) -> float:
        """Twice the baseline's, as in the tests (`2 max|baseline - ref| + 1e-5 max|ref|`)."""
        return 2 * self.bfloat16 + 1e-5


class Weights:
    """A random weight of one shape.

    Args:
        shape: N output and K input features.
        device: of everything.
        dtype: of the layers and of their x.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        n, k = self.shape = shape
        self.device, self.dtype = device, dtype
        generator = torch.Generator(device).manual_seed(0)
        self.codes = torch.empty((n, k // 2), dtype=torch.uint8, device=device)
        self.codes.random_(0, 256, generator=generator)
        scales = torch.empty((n, k // 16), dtype=torch.uint8, device=device)
        scales.random_(0x28, 0x48, generator=generator)  # E4M3: 1/4 .. 4
        self.scales = scales.view(torch.float8_e4m3fn)

    def x(self, m: int) -> torch.Tensor:
        """Random activations `[m, K]`."""
        generator = torch.Generator(self.device).manual_seed(m)
        x = torch.empty((m, self.shape[1]), device=self.device).normal_(generator=generator)
        return x.to(self.dtype)

    def layer(self, backend: str) -> NvFp4Linear:
        """A layer whose weights are in a backend's form; Humming's may split K, as by itself."""
        with HummingKernel.splitting_k():
            return self._layer(backend)

    def _layer(self, backend: str) -> NvFp4Linear:
        n, k = self.shape
        layer = NvFp4Linear(k, n, bias=False, dtype=self.dtype, device=self.device, backend=backend)
        # Clones, because a kernel may write a new order over the old.
        layer.load_tensors(
            {
                "weight": self.codes.clone(),
                "weight_scale": self.scales.clone(),
                "weight_scale_2": torch.tensor(GLOBAL_SCALE, device=self.device),
            },
            "modelopt",
        )
        layer.process_weights_after_loading()
        return layer

    def layers(self, backend: str) -> list[NvFp4Linear]:
        """The layer in enough copies."""
        layer = self.layer(backend)
        num_bytes = sum(p.numel() * p.element_size() for p in layer.parameters())
        return [layer, *(deepcopy(layer) for _ in range(rotation(num_bytes, self.device) - 1))]

    def dense(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Dequantized weights `[N, K]` in enough copies."""
        weight = self._dequantize(dtype)
        return [weight, *(weight.clone() for _ in range(rotation(weight.nbytes, self.device) - 1))]

    def errors(
        self, x: torch.Tensor, outs: Mapping[str, torch.Tensor], dense: torch.Tensor
    ) -> Errors:
        """Errors of products `[m, N]` by name.

        Args:
            x: `[m, K]`, what was multiplied.
            outs: the products, of any dtype.
            dense: the weights in bfloat16, for the baseline.
        """
        largest = x.new_zeros((), dtype=torch.float64)
        worst = {name: largest.clone() for name in [*outs, ""]}
        for start in range(0, x.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            exact = x[rows].double() @ self._exact.t()
            largest = torch.maximum(largest, exact.abs().max())
            baseline = F.linear(x[rows].bfloat16(), dense)
            for name, out in [*((name, out[rows]) for name, out in outs.items()), ("", baseline)]:
                # `maximum` passes NaN on.
                worst[name] = torch.maximum(worst[name], (out.double() - exact).abs().max())
        errors = {name: float(error / largest) for name, error in worst.items()}
        return Errors({name: errors[name] for name in outs}, errors[""])

    @cached_property
    def _exact(self) -> torch.Tensor:
        return self._dequantize(torch.float64)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.tensor(GLOBAL_SCALE, device=self.device)
        rows = [
            nvfp4.dequantize(codes, scales, scale, dtype)
            for codes, scales in zip(
                self.codes.split(_ROWS_AT_ONCE), self.scales.split(_ROWS_AT_ONCE), strict=True
            )
        ]
        return torch.cat(rows)


def rotation(num_bytes: int, device: torch.device) -> int:
    """How many copies of data take turns, so that none is in the caches when its turn comes."""
    return max(2, min(_MOST_COPIES, 1 + _ROTATED_BYTES[device.type] // num_bytes))


def layer_calls(layers: Sequence[NvFp4Linear], x: torch.Tensor) -> list[Call]:
    """A call of each layer."""
    return [partial(layer, x) for layer in layers]


def dense_calls(weights: Sequence[torch.Tensor], x: torch.Tensor) -> list[Call]:
    """PyTorch's product with each weight, in its dtype: on a GPU, cuBLAS."""
    x = x.to(weights[0].dtype)
    return [partial(F.linear, x, weight) for weight in weights]
