"""Random experts in every backend's format, bfloat16 ones in PyTorch, and the error of results."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F

from halfbyte.bench.data import GLOBAL_SCALE, copies, relative_errors
from halfbyte.bench.timing import Call
from halfbyte.dispatch import compute_capability_of
from halfbyte.moe import (
    GPT_OSS,
    SWIGLU,
    ExpertMatrices,
    GatedActivation,
    MoeConfig,
    PackedExperts,
    init_moe_kernel,
)
from halfbyte.moe.experts import BLOCK_SIZES, WeightFormat
from halfbyte.moe.reference import moe_reference
from halfbyte.numerics import block_fp4, nvfp4

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

    @property
    def activation(self) -> GatedActivation:
        """GPT-OSS's for MXFP4, else SwiGLU."""
        return GPT_OSS if self.weight_format == "mxfp4" else SWIGLU

    def config(self, dtype: torch.dtype, device: torch.device) -> MoeConfig:
        """Of a layer on a device."""
        return MoeConfig(
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            dtype,
            self.weight_format,
            has_bias=self.weight_format == "mxfp4",
            activation=self.activation,
            device_type=device.type,
            compute_capability=compute_capability_of(device),
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's codes and block scales."""
        values = 3 * self.hidden_size * self.intermediate_size
        return values // 2 + values // BLOCK_SIZES[self.weight_format]


class Experts:
    """Random experts of a shape; `dtype` is the activations'."""

    def __init__(self, shape: MoeShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        h, i = shape.hidden_size, shape.intermediate_size
        gate_up, down = self._matrices(2 * i, h, 2), self._matrices(h, i, 1)
        self.packed = PackedExperts(gate_up, down, shape.activation)
        self._forms: dict[str, list] = {}
        self._expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _matrices(self, n: int, k: int, parts: int) -> ExpertMatrices:
        e, is_mxfp4 = self.shape.num_experts, self.shape.weight_format == "mxfp4"
        codes = torch.empty((e, n, k // 2), dtype=torch.uint8, device=self.device)
        codes.random_(0, 256, generator=self._generator)
        block = BLOCK_SIZES[self.shape.weight_format]
        scales = torch.empty((e, n, k // block), dtype=torch.uint8, device=self.device)
        if is_mxfp4:  # between 2^-7 and 2^-4, as 0.02 of NVFP4's
            scales.random_(120, 124, generator=self._generator)
            bias = torch.randn((e, n), generator=self._generator, device=self.device)
            return ExpertMatrices(codes, scales, None, bias.to(self.dtype))
        scales.random_(0x28, 0x48, generator=self._generator)
        scale = torch.full((e, parts), GLOBAL_SCALE, dtype=torch.float32, device=self.device)
        return ExpertMatrices(codes, scales.view(torch.float8_e4m3fn), scale)

    def x(self, m: int) -> torch.Tensor:
        """Random hidden states `[M, H]`."""
        generator = torch.Generator(self.device).manual_seed(m)
        shape = (m, self.shape.hidden_size)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def routings(self, m: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random ids and weights `[M, top_k]`, for calls to rotate over."""
        return [self._routing(m, seed) for seed in range(_ROUTINGS)]

    def _routing(self, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (m, self.shape.num_experts)
        logits = torch.randn(size, generator=generator, device=self.device)
        values, ids = logits.topk(self.shape.top_k, dim=-1)
        return ids, values.softmax(-1)

    def bytes_hit(self, m: int) -> int:
        """Bytes of the experts that a call reads, in the mean over the routings."""
        hit = sum(ids.unique().numel() for ids, _ in self.routings(m))
        return hit * self.shape.expert_bytes // _ROUTINGS

    def calls(self, backend: str, x: torch.Tensor) -> list[Call]:
        """Calls of a backend, over routings and copies of the weights."""
        kernel = init_moe_kernel(self.shape.config(self.dtype, self.device), backend)
        forms = self.forms(backend, partial(kernel.prepare, self.packed))
        return [
            partial(kernel.apply, forms[i % len(forms)], x, *routing)
            for i, routing in enumerate(self.routings(x.shape[0]))
        ]

    def forms(self, name: str, prepare: Callable[[], Any]) -> list:
        """The weights as a contender prepares them, in copies; prepared once per name.

        Calls rotate over so many copies that one token's experts in all of them exceed the caches.
        """
        if name not in self._forms:
            first = prepare()
            count = min(_ROUTINGS, copies(self.bytes_hit(1), self.device))
            self._forms[name] = [first, *(deepcopy(first) for _ in range(count - 1))]
        return self._forms[name]

    def dense_calls(self, x: torch.Tensor) -> list[Call]:
        """PyTorch's grouped products with bfloat16 weights."""
        weights, x = self.dense, x.bfloat16()
        return [partial(self._dense_experts, weights, x, *r) for r in self.routings(x.shape[0])]

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bfloat16 `[E, N, K]`, the dequantized weights of gate_up and down."""
        gate_up, down = (
            torch.stack([_dequantized(matrices, e) for e in range(matrices.num_experts)])
            for matrices in (self.packed.gate_up, self.packed.down)
        )
        return gate_up, down

    def _dense_experts(
        self,
        weights: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """`[M, H]`, tokens sorted by expert; never syncs a GPU."""
        order = ids.flatten().argsort(stable=True)
        experts = ids.flatten()[order]
        places = torch.arange(self.shape.num_experts, device=x.device)
        ends = torch.searchsorted(experts, places, right=True).int()

        def linear(
            rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            return out if bias is None else out + bias[experts].to(out.dtype)

        rows = linear(x[order // ids.shape[1]], weights[0], self.packed.gate_up.bias)
        rows = linear(self.shape.activation(rows), weights[1], self.packed.down.bias)
        results = torch.empty_like(rows)
        results[order] = rows
        results = results.unflatten(0, ids.shape) * topk_weights[..., None]
        return results.sum(1).to(x.dtype)

    def error(self, x: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
        """Error of the first call's result for the first tokens, and the allowed error; see
        `relative_errors`. The bfloat16 baseline also weights experts' results in bfloat16."""
        if self._expected is None or self._expected[0] is not x:
            ids, weights = (t[:_CHECKED_TOKENS] for t in self.routings(x.shape[0])[0])
            rows = x[:_CHECKED_TOKENS]
            exact = moe_reference(rows.double(), self.packed, ids, weights)
            baseline = self._dense_experts(self.dense, rows.bfloat16(), ids, weights.bfloat16())
            self._expected = x, exact, baseline
        _, exact, baseline = self._expected
        return relative_errors(exact, out[:_CHECKED_TOKENS], baseline)


def _dequantized(matrices: ExpertMatrices, expert: int) -> torch.Tensor:
    """bfloat16 `[N, K]`; all global scales are equal here."""
    codes, scales = matrices.weight[expert], matrices.scales[expert]
    if matrices.format == "mxfp4":
        return block_fp4.dequantize_mxfp4(codes, scales, torch.bfloat16)
    return nvfp4.dequantize(codes, scales, GLOBAL_SCALE, torch.bfloat16)
