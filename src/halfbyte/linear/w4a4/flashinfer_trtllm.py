"""TensorRT-LLM's FP4 kernels (trtllm-gen) through FlashInfer, SM100 and SM103.

Not yet run on hardware.

Weights and their block scales have their rows interleaved (`layouts.gemm_layouts.interleave_rows`)
before the scales are swizzled 128 x 4, as FlashInfer's `shuffle_matrix_a` and `shuffle_matrix_sf_a`
do for an epilogue tile of 128 rows, but without a GPU. Up to 32 tokens use block scales in 8 x 4
tiles, for which trtllm-gen has separate kernels.
"""

from collections.abc import Collection
from typing import ClassVar

import torch

from halfbyte.layouts import swizzle_128x4, unswizzle_128x4
from halfbyte.layouts.gemm_layouts import BLOCK_SIZE, deinterleave_rows, interleave_rows
from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.flashinfer_fp4 import FlashInferFp4Kernel, multiply, quantize
from halfbyte.linear.w4a4.native_fp4 import Operand, native_fp4_op

_MAX_TOKENS_8X4 = 32
"""Max tokens for 8x4 scale tiles, as in vLLM."""


def _is_8x4(tokens: int) -> bool:
    return tokens <= _MAX_TOKENS_8X4


def _quantize(x: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    return quantize(x, global_scale, is_8x4=_is_8x4(x.shape[0]))


def _multiply(
    left: Operand, right: Operand, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    return multiply(left, right, dtype, backend="trtllm", is_8x4=_is_8x4(left.codes.shape[0]))


_linear = native_fp4_op("nvfp4_linear_flashinfer_trtllm", _quantize, _multiply)


class FlashInferTrtllmKernel(FlashInferFp4Kernel):
    """`flashinfer.mm_fp4(backend="trtllm")`: bfloat16, N and K padded to multiples of 128."""

    name: ClassVar[str] = "flashinfer_trtllm"
    library: ClassVar[str] = "TensorRT-LLM's FP4 matmul through FlashInfer"
    capabilities: ClassVar[Collection[int]] = frozenset({100, 103, 107})
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    row_multiple: ClassVar[int] = 128
    k_multiple: ClassVar[int] = 128

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear

    def arrange(
        self, weight: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows interleaved, then block scales swizzled."""
        return interleave_rows(weight), swizzle_128x4(interleave_rows(scales))

    def restore(
        self, weight: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of `arrange`."""
        rows, columns = weight.shape[0], 2 * weight.shape[1] // BLOCK_SIZE
        linear = unswizzle_128x4(scales, rows, columns)
        return deinterleave_rows(weight), deinterleave_rows(linear)
