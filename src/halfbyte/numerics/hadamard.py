"""The normalised Hadamard transform of head dims, in blocks of a power of two.

A head of D values is cut into equal blocks of the largest power of two n that divides D; each is
multiplied by the n x n Hadamard matrix in Sylvester's order, over sqrt(n). The matrix is symmetric
and its own inverse, so the transform undoes itself, and dot products of two transformed vectors are
those of the vectors.

The order of float32 operations is part of the definition, so that kernels can be bit-equal:
butterflies `(a + b, a - b)` of values 1 apart, then 2, 4, ... n/2, and one multiplication by
`float32(n ** -0.5)` at the end.
"""

import torch


def block_size(head_size: int) -> int:
    """The largest power of two that divides a head size."""
    return head_size & -head_size


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Transform the last dimension.

    Args:
        x: float `[..., D]`, D >= 1.

    Returns:
        float32 `[..., D]` (float64 for float64).
    """
    y = x if x.dtype == torch.float64 else x.float()
    n = block_size(x.shape[-1])
    stride = 1
    while stride < n:
        pairs = y.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return y * torch.tensor(n**-0.5, dtype=y.dtype, device=y.device)
