"""FBGEMM's FP4 matmul (fbgemm-gpu-genai), SM100 and SM103. Not yet run on hardware.

`torch.ops.fbgemm.f4f4bf16`, whose output is bfloat16. Its arguments differ between releases: older
ones distinguish NVFP4 from MXFP4 by `use_mx`, newer ones by the presence of a global scale.
Arguments are passed by keyword.

Its quantizer assumes a multiple of 4 block scales per row, hence K must be a multiple of 64.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from halfbyte.linear.ops import LinearOp
from halfbyte.linear.w4a4.native_fp4 import NativeFp4Kernel, Operand, native_fp4_op


@cache
def _quantizer() -> Any:
    return import_module("fbgemm_gpu.experimental.gemm.triton_gemm.fp4_quantize")


@cache
def _options() -> dict[str, bool]:
    """Further arguments that the installed `f4f4bf16` needs."""
    import_module("fbgemm_gpu.experimental.gen_ai")  # registers the operator
    arguments = torch.ops.fbgemm.f4f4bf16.default._schema.arguments
    return {"use_mx": False} if "use_mx" in {argument.name for argument in arguments} else {}


def _quantize(x: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    codes, scales = _quantizer().triton_scale_nvfp4_quant(x, global_scale)
    return Operand(codes, scales, global_scale)


def _multiply(
    left: Operand, right: Operand, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    options = _options()
    product: torch.Tensor = torch.ops.fbgemm.f4f4bf16(
        left.codes,
        right.codes,
        left.block_scales.view(torch.uint8).flatten(),
        right.block_scales.view(torch.uint8).flatten(),
        global_scale=right.global_scale,
        **options,
    )
    return product


_linear = native_fp4_op("nvfp4_linear_fbgemm", _quantize, _multiply)


class FbgemmKernel(NativeFp4Kernel):
    """`torch.ops.fbgemm.f4f4bf16`: bfloat16, K in multiples of 64."""

    name: ClassVar[str] = "fbgemm"
    library: ClassVar[str] = "FBGEMM's FP4 matmul"
    capabilities: ClassVar[frozenset[int]] = frozenset({100, 103})
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    k_multiple: ClassVar[int] = 64

    @classmethod
    def missing(cls) -> str | None:
        """fbgemm-gpu-genai, if not installed; not imported, because that loads its kernels."""
        package = find_spec("fbgemm_gpu")
        folders = package.submodule_search_locations if package else None
        if not any((Path(folder) / "experimental" / "gen_ai").exists() for folder in folders or ()):
            return "needs fbgemm-gpu-genai, which is not installed"
        return None

    def operator(self) -> LinearOp:
        """See `NativeFp4Kernel.operator`."""
        return _linear
