"""PyTorch's own block-scaled FP4 matmul (cuBLAS), SM100 and later. Not yet run on hardware.

`torch.nn.functional.scaled_mm` with two scales a side: block scales, 1 x 16 and swizzled 128 x 4
(`SWIZZLE_32_4_4`), and a global scale. The product of both global scales multiplies the
accumulator in float32; the bias is added there as well, except for float32 output, where cuBLAS
does not support it.

PyTorch has no FP4 quantizer: activations are quantized by `numerics.nvfp4.quantize`, bit for bit as
the oracle, in about thirty small kernels. The only W4A4 backend with float32 output."""

from typing import ClassVar

import torch
import torch.nn.functional as F

from halfbyte.layouts import swizzle_128x4
from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.native_fp4 import NativeFp4Kernel, Operand, native_fp4_op
from halfbyte.numerics import nvfp4

_OLDEST_CUDA = (12, 8)


def _quantize(x: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    codes, scales = nvfp4.quantize(x, global_scale)
    return Operand(codes, swizzle_128x4(scales), global_scale)


def _multiply(
    left: Operand, right: Operand, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    has_epilogue_bias = bias is not None and dtype != torch.float32
    out = F.scaled_mm(
        left.codes.view(torch.float4_e2m1fn_x2),
        right.codes.view(torch.float4_e2m1fn_x2).t(),
        [left.block_scales, left.global_scale],
        recipe,
        [right.block_scales, right.global_scale],
        recipe,
        swizzle,
        swizzle,
        bias if has_epilogue_bias else None,
        dtype,
    )
    return out if bias is None or has_epilogue_bias else out + bias


_linear = native_fp4_op(
    "nvfp4_linear_torch_scaled_mm", _quantize, _multiply, multiply_adds_bias=True
)


class TorchScaledMMKernel(NativeFp4Kernel):
    """`torch.nn.functional.scaled_mm`."""

    name: ClassVar[str] = "torch_scaled_mm"
    library: ClassVar[str] = "PyTorch's scaled_mm (cuBLAS)"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    scale_names: ClassVar[tuple[str, str]] = ("input_global_scale", "weight_global_scale")

    @classmethod
    def missing(cls) -> str | None:
        """PyTorch's FP4 support, if this PyTorch or the CUDA version of its build lacks it."""
        if not hasattr(F, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
            return f"needs torch.nn.functional.scaled_mm, torch {torch.__version__} has none"
        cuda = torch.version.cuda
        if cuda is None or tuple(map(int, cuda.split(".")[:2])) < _OLDEST_CUDA:
            return f"needs a PyTorch for CUDA 12.8 or later, this one is for {cuda}"
        return None

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear
