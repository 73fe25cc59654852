"""Names of the backends that call other libraries, and their dtypes."""

import torch

W4A4 = (
    "torch_scaled_mm",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
    "flashinfer_cudnn",
    "cutlass",
    "fbgemm",
)
W4A16 = ("humming", "marlin")
BF16, FP16 = torch.bfloat16, torch.float16
ALL_DTYPES = (BF16, FP16, torch.float32)
DTYPES = {"torch_scaled_mm": ALL_DTYPES, "flashinfer_trtllm": (BF16,), "fbgemm": (BF16,)}


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    return DTYPES.get(name, (BF16, FP16))
