"""Dequantize and multiply expert by expert, in PyTorch: the oracle of every MoE kernel.

All in float32 (float64 for float64 hidden states, as tests ask): `e2m1 * block_scale` is exact, the
accumulators are multiplied by the global scale of their part, nothing is rounded in between, and
the weighted sum is rounded once. Only the experts that are hit are read; on a GPU, finding them
syncs, so that this backend cannot be captured in CUDA graphs.

Batch invariance: products of one shape only, as in `linear.reference`."""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer
from halfbyte.linear.reference import product
from halfbyte.moe.as_loaded import AsLoadedKernel, MatrixTensors, as_loaded_op
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.experts import BLOCK_SIZES, ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.grouping import hit_experts, weighted_sum
from halfbyte.numerics import e2m1, e4m3, e8m0


def moe_reference(
    hidden: torch.Tensor,
    experts: PackedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`moe_experts` by the oracle; float64 hidden states are calculated in float64."""
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    x = hidden.to(compute)
    results = x.new_zeros((topk_ids.numel(), experts.hidden_size))
    for expert, pairs in hit_experts(topk_ids, experts.num_experts):
        rows = x[pairs // topk_ids.shape[1]]
        interleaved = experts.activation.interleaved
        rows = _linear(rows, experts.gate_up, expert, interleaved, batch_invariant)
        rows = experts.activation(rows)
        results[pairs] = _linear(rows, experts.down, expert, False, batch_invariant)
    return weighted_sum(results, topk_weights, topk_ids, experts.num_experts).to(hidden.dtype)


def _linear(
    rows: torch.Tensor,
    matrices: ExpertMatrices,
    expert: int,
    interleaved: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    values = _values(matrices, expert).to(rows.dtype)
    result = product(rows, values.t(), batch_invariant)
    result *= matrices.row_scales(interleaved)[expert]
    if matrices.bias is not None:
        result += matrices.bias[expert].to(rows.dtype)
    return result


def _values(matrices: ExpertMatrices, expert: int) -> torch.Tensor:
    """float32 `[N, K]`: `e2m1 * block_scale` of an expert, exact, without the global scale."""
    decode = e4m3.decode if matrices.format == "nvfp4" else e8m0.decode
    scales = decode(matrices.scales[expert])
    values = e2m1.decode_packed(matrices.weight[expert])
    blocks = values.unflatten(-1, (-1, BLOCK_SIZES[matrices.format]))
    return (blocks * scales[..., None]).flatten(-2)


@as_loaded_op("nvfp4_moe_reference")
def nvfp4_moe_reference(
    x: torch.Tensor,
    gate_up: MatrixTensors,
    down: MatrixTensors,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool,
) -> torch.Tensor:
    """`moe_reference` as an operator."""
    experts = PackedExperts(ExpertMatrices(*gate_up), ExpertMatrices(*down), activation)
    return moe_reference(x, experts, topk_ids, topk_weights, batch_invariant)


class ReferenceKernel(AsLoadedKernel):
    """`moe_reference` on the tensors as loaded."""

    name: ClassVar[str] = "reference"
    product = staticmethod(nvfp4_moe_reference)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Everywhere."""
        return True, "runs wherever PyTorch does"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every layer."""
        return True, "every shape, format and activation"
