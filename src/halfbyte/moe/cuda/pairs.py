"""Pairs of a token and one of its experts, as a parameter of kernels."""

import ctypes

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of weights and biases, as in `routing.cuh`."""


class Pairs(ctypes.Structure):
    """`Pairs` of `routing.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "weights")),
        *((name, ctypes.c_int) for name in ("ids_are_64_bit", "weights_dtype", "count", "top_k")),
        *((name, ctypes.c_int) for name in ("num_experts", "columns_log2")),
    )


def pairs_of(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> Pairs:
    """Pairs of ids and weights `[M, top_k]`, which must stay alive; contiguous."""
    return Pairs(
        topk_ids.data_ptr(),
        topk_weights.data_ptr(),
        topk_ids.dtype == torch.int64,
        DTYPES[topk_weights.dtype],
        topk_ids.numel(),
        topk_ids.shape[1],
        num_experts,
    )
