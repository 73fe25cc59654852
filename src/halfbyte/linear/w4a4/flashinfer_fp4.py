"""Base of the backends that call FlashInfer's `mm_fp4`, which has several backends itself.

FlashInfer compiles its kernels, or loads compiled ones, at the first call. Its autotuner runs only
inside `flashinfer.autotune`.
"""

from collections.abc import Collection
from importlib import import_module
from typing import Any, ClassVar

import torch

from halfbyte.kernels.runtime.flashinfer_package import missing_flashinfer
from halfbyte.linear.w4a4.native_fp4 import Multiply, NativeFp4Kernel, Operand, Quantize

MM_FP4_CAPABILITIES = frozenset({100, 103, 107, 110, 120, 121})
"""Compute capabilities that `mm_fp4` supports, from FlashInfer's own list (0.7.0)."""


def flashinfer() -> Any:
    """The package, imported on first use: the import takes seconds."""
    return import_module("flashinfer")


def quantize(x: torch.Tensor, global_scale: torch.Tensor, *, is_8x4: bool = False) -> Operand:
    """Quantize with `flashinfer.fp4_quantize`.

    Args:
        x: float16 or bfloat16 `[M, K]`, K % 16 == 0.
        global_scale: float32 `[1]`, encode.
        is_8x4: block scales in 8x4 instead of 128x4 tiles, for trtllm-gen with small M.
    """
    codes, scales = flashinfer().fp4_quantize(
        x,
        global_scale,
        sf_vec_size=16,
        sf_use_ue8m0=False,
        is_sf_swizzled_layout=True,
        is_sf_8x4_layout=is_8x4,
    )
    return Operand(codes, scales, global_scale)


def multiply(
    left: Operand, right: Operand, dtype: torch.dtype, *, backend: str, is_8x4: bool = False
) -> torch.Tensor:
    """Multiply with `flashinfer.mm_fp4`, which takes `right` transposed; `right` has alpha."""
    product: torch.Tensor = flashinfer().mm_fp4(
        left.codes,
        right.codes.t(),
        left.block_scales.view(torch.uint8),
        right.block_scales.view(torch.uint8).t(),
        right.global_scale,
        dtype,
        block_size=16,
        use_8x4_sf_layout=is_8x4,
        backend=backend,
        use_nvfp4=True,
    )
    return product


def functions(backend: str) -> tuple[Quantize, Multiply]:
    """Arguments of `native_fp4_op` for backends of `mm_fp4` that use 128x4 scale tiles."""

    def multiply_by(
        left: Operand, right: Operand, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return multiply(left, right, dtype, backend=backend)

    return quantize, multiply_by


class FlashInferFp4Kernel(NativeFp4Kernel):
    """A backend of `flashinfer.mm_fp4`."""

    capabilities: ClassVar[Collection[int]] = MM_FP4_CAPABILITIES

    @classmethod
    def missing(cls) -> str | None:
        """FlashInfer, or both nvcc and FlashInfer's compiled kernels, if not installed."""
        return missing_flashinfer()
