"""FlashInfer's CUTLASS kernels for FP4 times FP4, SM100 and later. Not yet run on hardware."""

from typing import ClassVar

from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.flashinfer_fp4 import FlashInferFp4Kernel, functions
from halfbyte.linear.w4a4.native_fp4 import native_fp4_op

_linear = native_fp4_op("nvfp4_linear_flashinfer_cutlass", *functions("cutlass"))


class FlashInferCutlassKernel(FlashInferFp4Kernel):
    """`flashinfer.mm_fp4(backend="cutlass")`: N and K in multiples of 32."""

    name: ClassVar[str] = "flashinfer_cutlass"
    library: ClassVar[str] = "FlashInfer's CUTLASS FP4 matmul"

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear
