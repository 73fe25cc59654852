"""What the benchmarks of linear layers and of experts share: random weights, and the run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from halfbyte.dispatch import Registry
from halfbyte.measure.report import Report, Row, new_report, or_failed
from halfbyte.measure.timing import Call, copied, measure
from halfbyte.numerics import block_fp4, nvfp4

GLOBAL_SCALE = 0.02
_OURS = ("cuda", "triton", "cpu")
_ROWS_AT_ONCE = 1024


class RandomWeights(ABC):
    """Random 4-bit weights of one shape for all contenders; `dtype` is that of x `[M, K]`."""

    def __init__(self, shape: Any, k: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.k, self.device, self.dtype = shape, k, device, dtype
        self.generator = torch.Generator(device).manual_seed(0)
        self._prepared: dict[str, list[Any]] = {}
        self._expected: tuple[torch.Tensor, ...] = ()

    @abstractmethod
    def calls(self, backend: str, x: torch.Tensor) -> list[Call]:
        """Calls of a backend on copies of the weights."""

    @abstractmethod
    def dense_calls(self, x: torch.Tensor) -> list[Call]:
        """PyTorch's calls with bfloat16 weights."""

    @abstractmethod
    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first call returns, in float64, and with bfloat16 weights and x."""

    def x(self, m: int) -> torch.Tensor:
        """Random activations."""
        generator = torch.Generator(self.device).manual_seed(m)
        return torch.randn((m, self.k), generator=generator, device=self.device).to(self.dtype)

    def random_weight(self, *shape: int, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        """E2M1 codes of `[..., K]` and block scales: E4M3 of 1/4 to 4, or E8M0 of 2^-7 to 2^-4."""
        *rows, k = shape
        codes = torch.empty((*rows, k // 2), dtype=torch.uint8, device=self.device)
        scales = torch.empty((*rows, k // block), dtype=torch.uint8, device=self.device)
        codes.random_(0, 256, generator=self.generator)
        if block != 16:
            return codes, scales.random_(120, 124, generator=self.generator)
        scales.random_(0x28, 0x48, generator=self.generator)
        return codes, scales.view(torch.float8_e4m3fn)

    def dequantized(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The values `[..., K]` of `random_weight`, NVFP4's times the global scale."""
        rows = (tensor.flatten(0, -2).split(_ROWS_AT_ONCE) for tensor in (codes, scales))
        parts = zip(*rows, strict=True)
        if scales.dtype == torch.uint8:
            values = [block_fp4.dequantize_mxfp4(c, s, dtype) for c, s in parts]
        else:
            values = [nvfp4.dequantize(c, s, GLOBAL_SCALE, dtype) for c, s in parts]
        return torch.cat(values).view(*codes.shape[:-1], -1)

    def prepared(self, name: str, prepare: Callable[[], Any], count: int) -> list[Any]:
        """The weights as a contender prepares them, once per name, in `count` copies."""
        if name not in self._prepared:
            self._prepared[name] = copied(prepare(), count)
        return self._prepared[name]

    def error(self, x: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
        """Max error of the first call's result relative to the max value of float64's, and the
        allowed error: twice that of bfloat16, and 1e-5."""
        if not self._expected or self._expected[0] is not x:
            self._expected = x, *self.expected(x)
        _, exact, baseline = self._expected
        results = out[: len(exact)], baseline
        errors = [float((y.double() - exact).abs().max() / exact.abs().max()) for y in results]
        return errors[0], 2 * errors[1] + 1e-5


class ProductBenchmark(ABC):
    """Measures every shape with every number of tokens, and collects `report`.

    A row has `name`, `shape`, `m` and under `contenders` by name: times, `error` and
    `allowed_error` (see `RandomWeights.error`).

    Args:
        shapes: of weights; ValueError for an invalid one.
        tokens: M, each at least 1.
        backends: names in `registry`, by default halfbyte's own that run here;
            NoImplementationError for an unknown one, or one that cannot run.
        dtype: of x.
    """

    registry: ClassVar[Registry[Any]]
    weights: ClassVar[type[Any]]
    """A subclass of `RandomWeights`, made of shape, device and dtype."""
    shapes: ClassVar[dict[str, Sequence[Any]]]
    tokens: ClassVar[dict[str, Sequence[int]]]
    """Default shapes and tokens, by `torch.device.type`."""

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[Any] = (),
        tokens: Sequence[int] = (),
        backends: Sequence[str] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device, self.dtype = device, dtype
        ms = list(dict.fromkeys(tokens or self.tokens[device.type]))
        shapes = list(dict.fromkeys(shapes or self.shapes[device.type]))
        self.cases = [(shape, m) for shape in shapes for m in ms]
        configs = [self.config(shape, dtype, device, m) for shape, m in self.cases]
        for config in configs:
            for name in backends:
                self.registry.select(config, explicit=name)
        verdicts = self.registry.explain(configs[-1])
        ours = [v.name for v in verdicts if v.usable and v.name in _OURS]
        self.backends = list(dict.fromkeys(backends or ours or ["reference"]))
        fields = {"dtype": str(dtype).removeprefix("torch."), "backends": self.backends}
        self.report: Report = new_report(device) | fields

    @staticmethod
    @abstractmethod
    def config(shape: Any, dtype: torch.dtype, device: torch.device, m: int | None = None) -> Any:
        """The config of a layer, from which backends tell whether they support it."""

    def fields(self, shape: Any) -> Row:
        """Fields of a row that describe its shape."""
        return {"shape": str(shape)}

    def run(self) -> Iterator[Row]:
        """Measure all cases; yields each row after adding it to the report."""
        weights = None
        for shape, m in self.cases:
            if weights is None or weights.shape != shape:
                weights = self.weights(shape, self.device, self.dtype)
            x = weights.x(m)
            calls = {name: partial(weights.calls, name, x) for name in self.backends}
            calls["dense_bf16"] = partial(weights.dense_calls, x)
            contenders = {n: or_failed(partial(self.entry, weights, x, n, calls[n])) for n in calls}
            fields = self.fields(shape)
            row = {"name": f"{fields['shape']} M={m}", **fields, "m": m, "contenders": contenders}
            self.report["microseconds"].append(row)
            yield row

    def entry(
        self, weights: Any, x: torch.Tensor, name: str, make: Callable[[], list[Call]]
    ) -> Row:
        """A contender's times, `error` and `allowed_error`; RuntimeError for a wrong result."""
        calls = make()
        error, allowed = weights.error(x, calls[0]())
        if not error <= allowed:  # also for NaN
            raise RuntimeError(f"wrong results: error {error:.3g}, allowed {allowed:.3g}")
        return {**measure(calls, self.device), "error": error, "allowed_error": allowed}
