"""cuDNN's FP4 matmul through FlashInfer, SM100 and later. Not yet run on hardware."""

from typing import ClassVar

from halfbyte.dispatch import is_installed
from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.flashinfer_fp4 import FlashInferFp4Kernel, functions
from halfbyte.linear.w4a4.native_fp4 import native_fp4_op

_linear = native_fp4_op("nvfp4_linear_flashinfer_cudnn", *functions("cudnn"))


class FlashInferCudnnKernel(FlashInferFp4Kernel):
    """`flashinfer.mm_fp4(backend="cudnn")`: the layouts of CUTLASS."""

    name: ClassVar[str] = "flashinfer_cudnn"
    library: ClassVar[str] = "cuDNN's FP4 matmul through FlashInfer"

    @classmethod
    def missing(cls) -> str | None:
        """FlashInfer or cuDNN's Python front end, if one is not installed."""
        if not is_installed("cudnn"):
            return "needs nvidia-cudnn-frontend, which is not installed"
        return super().missing()

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear
