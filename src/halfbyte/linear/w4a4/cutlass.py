"""vLLM's CUTLASS kernels for FP4 times FP4, through an installed vLLM. Not yet run on hardware.

`vllm._custom_ops.scaled_fp4_quant` and `cutlass_scaled_fp4_mm`, called as vLLM 0.20 to 0.33 call
them; SM100 and later.
"""

from importlib import import_module
from typing import Any, ClassVar

import torch

from halfbyte.dispatch import is_installed
from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.native_fp4 import NativeFp4Kernel, Operand, native_fp4_op


def _ops() -> Any:
    return import_module("vllm._custom_ops")


def _quantize(x: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    codes, scales = _ops().scaled_fp4_quant(x, global_scale)
    return Operand(codes, scales, global_scale)


def _multiply(
    left: Operand, right: Operand, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    product: torch.Tensor = _ops().cutlass_scaled_fp4_mm(
        left.codes,
        right.codes,
        left.block_scales,
        right.block_scales,
        right.global_scale,
        dtype,
    )
    return product


_linear = native_fp4_op("nvfp4_linear_cutlass", _quantize, _multiply)


class CutlassKernel(NativeFp4Kernel):
    """`vllm._custom_ops.cutlass_scaled_fp4_mm`: N and K in multiples of 32."""

    name: ClassVar[str] = "cutlass"
    library: ClassVar[str] = "vLLM's CUTLASS FP4 matmul"

    @classmethod
    def missing(cls) -> str | None:
        """vLLM, if it is not installed."""
        return None if is_installed("vllm") else "needs vllm, which is not installed"

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear
