"""Experts with larger sizes and the same results."""

import torch
import torch.nn.functional as F

from halfbyte.moe import ExpertMatrices, PackedExperts


def padded_experts(
    experts: PackedExperts, hidden_size: int, intermediate_size: int
) -> PackedExperts:
    """Experts whose first `H` results for x, padded with zeros, are those for x.

    Added rows and columns are zeros. An added row of gate and up gives 0 after the activation.

    Args:
        experts: MXFP4, with gate and up interleaved.
        hidden_size, intermediate_size: multiples of 32, at least those of the experts.

    Raises:
        ValueError: experts in another format or order.
    """
    if experts.gate_up.format != "mxfp4" or not experts.activation.interleaved:
        raise ValueError("experts: expected MXFP4 with gate and up interleaved")
    gate_up = _padded(experts.gate_up, 2 * intermediate_size, hidden_size)
    down = _padded(experts.down, hidden_size, intermediate_size)
    return PackedExperts(gate_up, down, experts.activation)


def _padded(matrices: ExpertMatrices, n: int, k: int) -> ExpertMatrices:
    rows, columns = n - matrices.n, k - matrices.k
    bias = matrices.bias
    return ExpertMatrices(
        F.pad(matrices.weight, (0, columns // 2, 0, rows)),
        F.pad(matrices.scales, (0, columns // 32, 0, rows), value=127),  # 1, times codes of 0
        None,
        None if bias is None else F.pad(bias, (0, rows)),
    )


def padded_tokens(x: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """`[M, hidden_size]`, with zeros after x `[M, H]`."""
    return F.pad(x, (0, hidden_size - x.shape[1]))
