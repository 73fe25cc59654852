"""The MoE benchmark: 4-bit experts on halfbyte's kernels, bfloat16 experts on PyTorch's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from halfbyte.bench.products import GLOBAL_SCALE, ProductBenchmark, RandomWeights
from halfbyte.dispatch import compute_capability_of
from halfbyte.measure.report import Row, bandwidth
from halfbyte.measure.timing import Call, copies
from halfbyte.moe import GPT_OSS, MOE_BACKENDS, SWIGLU, ExpertMatrices, MoeConfig, PackedExperts
from halfbyte.moe.experts import BLOCK_SIZES, WeightFormat
from halfbyte.moe.reference import moe_reference
from halfbyte.moe.registry import init_moe_kernel

_ROUTINGS = 8
"""Routings that calls rotate over, so that they hit different experts."""
_CHECKED_TOKENS = 64
"""Tokens whose results are compared; a token's result depends on no other."""


@dataclass(frozen=True)
class MoeShape:
    """Experts of a layer, and how many of them a token has."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    weight_format: WeightFormat = "nvfp4"

    def __str__(self) -> str:
        sizes = (self.num_experts, self.top_k, self.hidden_size, self.intermediate_size)
        return "x".join(map(str, sizes)) + ("-mxfp4" if self.weight_format == "mxfp4" else "")

    def config(self, dtype: torch.dtype, device: torch.device) -> MoeConfig:
        """The config of a layer; MXFP4 has GPT-OSS's activation and biases."""
        is_mxfp4 = self.weight_format == "mxfp4"
        return MoeConfig(
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            dtype,
            self.weight_format,
            has_bias=is_mxfp4,
            activation=GPT_OSS if is_mxfp4 else SWIGLU,
            device_type=device.type,
            compute_capability=compute_capability_of(device),
        )


MOE_SHAPES = {
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768),
    "gpt-oss-20b": MoeShape(32, 4, 2880, 2880, "mxfp4"),
}


class RandomExperts(RandomWeights):
    """Random experts of a `MoeShape`."""

    def __init__(self, shape: MoeShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, shape.hidden_size, device, dtype)
        h, i = shape.hidden_size, shape.intermediate_size
        gate_up, down = self._matrices(2 * i, h, 2), self._matrices(h, i, 1)
        activation = shape.config(dtype, device).activation
        self.packed = PackedExperts(gate_up, down, activation)
        tensors = (gate_up.weight, gate_up.scales, down.weight, down.scales)
        self.expert_bytes = sum(tensor[0].nbytes for tensor in tensors)

    def _matrices(self, n: int, k: int, parts: int) -> ExpertMatrices:
        e, block = self.shape.num_experts, BLOCK_SIZES[self.shape.weight_format]
        codes, scales = self.random_weight(e, n, k, block=block)
        if self.shape.weight_format == "mxfp4":
            bias = torch.randn((e, n), generator=self.generator, device=self.device)
            return ExpertMatrices(codes, scales, None, bias.to(self.dtype))
        scale = torch.full((e, parts), GLOBAL_SCALE, dtype=torch.float32, device=self.device)
        return ExpertMatrices(codes, scales, scale)

    def routings(self, m: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random ids and weights `[M, top_k]`, for calls to rotate over."""
        size, routings = (m, self.shape.num_experts), []
        for seed in range(_ROUTINGS):
            generator = torch.Generator(self.device).manual_seed(seed)
            logits = torch.randn(size, generator=generator, device=self.device)
            values, ids = logits.topk(self.shape.top_k, dim=-1)
            routings.append((ids, values.softmax(-1)))
        return routings

    def bytes_hit(self, m: int) -> int:
        """Bytes of the experts that a call reads, in the mean over the routings."""
        hit = sum(ids.unique().numel() for ids, _ in self.routings(m))
        return hit * self.expert_bytes // _ROUTINGS

    def forms(self, name: str, prepare: Callable[[], Any]) -> list[Any]:
        """Copies of the weights as a contender prepares them: enough that the experts of a single
        token, in all copies together, exceed the caches."""
        count = min(_ROUTINGS, copies(self.bytes_hit(1), self.device))
        return self.prepared(name, prepare, count)

    def calls(self, backend: str, x: torch.Tensor) -> list[Call]:
        """Calls of a backend, over routings and copies of the weights."""
        kernel = init_moe_kernel(self.shape.config(self.dtype, self.device), backend)
        forms = self.forms(backend, partial(kernel.prepare, self.packed))
        return [
            partial(kernel.apply, forms[i % len(forms)], x, *routing)
            for i, routing in enumerate(self.routings(x.shape[0]))
        ]

    def dense_calls(self, x: torch.Tensor) -> list[Call]:
        """PyTorch's grouped products with bfloat16 weights."""
        x = x.bfloat16()
        return [partial(self._dense_experts, x, *r) for r in self.routings(x.shape[0])]

    @cached_property
    def dense(self) -> list[torch.Tensor]:
        """bfloat16 `[E, N, K]`, the dequantized weights of gate_up and down."""
        both = (self.packed.gate_up, self.packed.down)
        return [self.dequantized(m.weight, m.scales, torch.bfloat16) for m in both]

    def _dense_experts(
        self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[M, H]`, tokens sorted by expert; never syncs a GPU."""
        order = ids.flatten().argsort(stable=True)
        experts = ids.flatten()[order]
        places = torch.arange(self.shape.num_experts, device=x.device)
        ends = torch.searchsorted(experts, places, right=True).int()

        def add_bias(rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return rows if bias is None else rows + bias[experts].to(rows.dtype)

        gate_up, down = (weight.transpose(1, 2) for weight in self.dense)
        rows = F.grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends)
        rows = self.packed.activation(add_bias(rows, self.packed.gate_up.bias))
        rows = add_bias(F.grouped_mm(rows, down, offs=ends), self.packed.down.bias)
        results = torch.empty_like(rows)
        results[order] = rows
        results = results.unflatten(0, ids.shape) * topk_weights[..., None]
        return results.sum(1).to(x.dtype)

    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the first tokens. In bfloat16 the router's weights are rounded, too."""
        ids, weights = (t[:_CHECKED_TOKENS] for t in self.routings(x.shape[0])[0])
        x = x[:_CHECKED_TOKENS]
        exact = moe_reference(x.double(), self.packed, ids, weights)
        return exact, self._dense_experts(x.bfloat16(), ids, weights.bfloat16())


class MoeBenchmark(ProductBenchmark):
    """Shapes are `MoeShape`s, backends those of `MOE_BACKENDS`; their entries also have `bytes` of
    the experts hit, `terabytes_per_s`, and `fraction` of the machine's read bandwidth."""

    registry, weights = MOE_BACKENDS, RandomExperts
    shapes: ClassVar = {"cuda": tuple(MOE_SHAPES.values()), "cpu": (MoeShape(16, 4, 1024, 512),)}
    tokens: ClassVar = {"cuda": (1, 4, 16, 64, 256, 1024, 8192), "cpu": (1, 4, 16, 64)}

    @staticmethod
    def config(
        shape: MoeShape, dtype: torch.dtype, device: torch.device, m: int | None = None
    ) -> MoeConfig:
        """The config of a layer, for any number of tokens."""
        return shape.config(dtype, device)

    def entry(
        self, weights: RandomExperts, x: torch.Tensor, name: str, make: Callable[[], list[Call]]
    ) -> Row:
        """Times, errors, and a backend's bandwidth."""
        entry = super().entry(weights, x, name, make)
        if name in self.backends:
            peak = self.report["read_terabytes_per_s"]
            entry |= bandwidth(weights.bytes_hit(len(x)), entry["back_to_back"], peak)
        return entry
