"""Base of the W4A4 backends that call a library's FP4 matmul on Blackwell.

The library multiplies `e2m1 * block_scale` of both sides, accumulates in float32, and multiplies
the accumulator by one number, the product of both global scales. Activations are quantized in the
call by the library's own quantizer. It divides approximately, so its codes may differ from
`numerics.nvfp4.quantize` where a quotient is next to a tie.

The layout that libraries expect, compared with the loaded one:
- codes `[N, K/2]` in the same order, N and K padded with zeros to the library's multiples;
- block scales of 128 rows x 4 blocks swizzled (`swizzle_128x4`), for weights once, for activations
  in every call;
- one global scale per call, so parts with different scales are separate calls (`runs`).
"""

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.dispatch import CPU, Answer, current_compute_capability
from halfbyte.layouts import swizzle_128x4, unswizzle_128x4
from halfbyte.layouts.gemm_layouts import BLOCK_SIZE, pad_weight
from halfbyte.linear.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from halfbyte.linear.ops import LinearOp, linear_op
from halfbyte.linear.runs import Run, concat_outputs, concatenate, runs_of
from halfbyte.linear.tensors import matrix_of, set_tensor, tensor_of

BLACKWELL = range(100, 130)
"""Compute capabilities with FP4 tensor cores: data centre (10.x, 11.x) and desktop (12.x)."""


class Operand(NamedTuple):
    """One side of the product."""

    codes: torch.Tensor
    """uint8 `[rows, K/2]`."""
    block_scales: torch.Tensor
    """Block scales in the library's layout."""
    global_scale: torch.Tensor
    """float32 `[1]`; its meaning depends on the backend's `scale_names`."""


Quantize = Callable[[torch.Tensor, torch.Tensor], Operand]
"""(x `[M, K]`, global scale float32 `[1]`) -> the left operand."""
Multiply = Callable[[Operand, Operand, torch.dtype, torch.Tensor | None], torch.Tensor]
"""(left, right, dtype, bias `[rows of the right]` or None) -> `[M, rows of the right]`."""


def native_fp4_op(
    name: str, quantize: Quantize, multiply: Multiply, *, multiply_adds_bias: bool = False
) -> LinearOp:
    """An operator that quantizes x and multiplies it by every run of a layer.

    Args:
        name: of the operator.
        quantize: the library's.
        multiply: the library's.
        multiply_adds_bias: `multiply` adds the bias before rounding; else it is added afterwards.
    """

    @linear_op(name)
    def native_fp4_linear(
        x: torch.Tensor,
        weights: list[torch.Tensor],
        weight_scales: list[torch.Tensor],
        global_scales: list[torch.Tensor],
        input_scale: torch.Tensor,
        bias: torch.Tensor | None,
        rows: list[int],
        n: int,
    ) -> torch.Tensor:
        matrix = matrix_of(x)
        if not matrix.shape[0]:
            return x.new_empty((*x.shape[:-1], n))
        padding = 2 * weights[0].shape[1] - matrix.shape[1]
        if padding:
            matrix = F.pad(matrix, (0, padding))
        left = quantize(matrix, input_scale.reshape(1))
        biases: list[torch.Tensor | None] = [None] * len(rows)
        if bias is not None and multiply_adds_bias:
            chunks = zip(bias.split(rows), weights, strict=True)
            biases = [F.pad(b, (0, w.shape[0] - b.shape[0])).contiguous() for b, w in chunks]
        rights = map(Operand, weights, weight_scales, global_scales)
        outputs = [
            multiply(left, right, x.dtype, b) for right, b in zip(rights, biases, strict=True)
        ]
        wanted = [out[:, :count] for out, count in zip(outputs, rows, strict=True)]
        result = concat_outputs(wanted, None if multiply_adds_bias else bias)
        return result.contiguous().view(*x.shape[:-1], n)

    return native_fp4_linear


class NativeFp4Kernel(NvFp4LinearKernel):
    """Subclasses define supported GPUs and shapes, the layout of weights, and the operator."""

    library: ClassVar[str]
    capabilities: ClassVar[Collection[int]] = BLACKWELL
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    row_multiple: ClassVar[int] = 32
    k_multiple: ClassVar[int] = 32
    scale_names: ClassVar[tuple[str, str]] = ("input_global_scale_inv", "alpha")
    """Names of the scale tensors that the operator gets: of the activations, and per part."""

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.runs: list[Run] = []

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On Blackwell; for this machine, only if the library is installed."""
        here = compute_capability is None
        capability = current_compute_capability() if here else compute_capability
        assert capability is not None
        if capability == CPU:
            return False, "needs an NVIDIA GPU"
        if capability not in cls.capabilities:
            return False, f"{cls.library} is not for compute capability {capability / 10}"
        missing = cls.missing() if here else None
        return missing is None, missing or cls.library

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """W4A4 layers on a GPU, in the library's output dtypes."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if not config.quantize_activations:
            return False, "multiplies FP4 by FP4: a W4A16 layer's activations are not quantized"
        if config.dtype not in cls.dtypes:
            takes = " and ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            return False, f"takes {takes}, not {str(config.dtype).removeprefix('torch.')}"
        if config.batch_invariant:
            return False, f"{cls.library} promises no batch invariance"
        return True, f"{cls.library}, W4A4"

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What this machine lacks, checked without importing the library; None if nothing."""

    @abstractmethod
    def operator(self) -> LinearOp:
        """The operator, made by `native_fp4_op`."""

    def arrange(
        self, weight: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert padded codes and linear block scales to the library's layout."""
        return weight, swizzle_128x4(scales)

    def restore(
        self, weight: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of `arrange`."""
        rows, columns = weight.shape[0], 2 * weight.shape[1] // BLOCK_SIZE
        return weight, unswizzle_128x4(scales, rows, columns)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pad and arrange the weights of each run of parts with equal global scales."""
        weight, scales = tensor_of(layer, "weight"), tensor_of(layer, "weight_scale")
        per_part = tensor_of(layer, self.scale_names[1])
        self.runs = runs_of(self.config, layer)
        for run in self.runs:
            codes, linear = pad_weight(
                run.of(weight), run.of(scales), self.row_multiple, self.k_multiple
            )
            codes, block_scales = self.arrange(codes, linear)
            padding = codes.shape[1] - weight.shape[1]
            set_tensor(layer, run.name("weight"), codes.contiguous())
            set_tensor(layer, run.name("weight_scale"), block_scales)
            if run.index:
                own = per_part[run.part : run.part + 1].clone()
                set_tensor(layer, run.name(self.scale_names[1]), own)
        cast(Any, layer).weights_padding_cols = padding

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `NvFp4LinearKernel.apply_weights`."""
        input_scale, per_part = self.scale_names
        return self.operator()(
            x,
            [getattr(layer, run.name("weight")) for run in self.runs],
            [getattr(layer, run.name("weight_scale")) for run in self.runs],
            [getattr(layer, run.name(per_part))[:1] for run in self.runs],
            getattr(layer, input_scale),
            bias,
            [run.rows for run in self.runs],
            self.config.n,
        )

    def restore_weights(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Restore the runs' weights to the loaded layout, without padding."""
        weights, scales = [], []
        for run in self.runs:
            codes, linear = self.restore(
                tensor_of(layer, run.name("weight")), tensor_of(layer, run.name("weight_scale"))
            )
            weights.append(codes[: run.rows, : self.config.k // 2])
            scales.append(linear[: run.rows, : self.config.k // BLOCK_SIZE])
        return concatenate(weights), concatenate(scales)
