"""Operand dtypes and input precision of `tl.dot`."""

import torch
import triton
import triton.language as tl

_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def dot_operand(dtype: torch.dtype, interpreted: bool = False) -> tl.dtype:
    """Triton's name of float16, bfloat16 or float32; float32 for bfloat16 in Triton's interpreter,
    which cannot multiply it."""
    return tl.float32 if interpreted and dtype == torch.bfloat16 else _DTYPES[dtype]


@triton.constexpr_function
def dot_precision(operand: tl.dtype) -> str:
    """TF32x3 for float32 operands, as accurate as float32 sums."""
    return "tf32x3" if operand == tl.float32 else "tf32"
