"""C++ on CPUs: two products of `linear/w4a16/cpu.py` per expert that is hit, over its tokens.

Experts that no token has are not read. Sizes that decide (which experts, how many tokens) are known
on the host, so there is no grouped kernel: a call per expert costs microseconds.

Weights are transposed as those of linear layers. MXFP4 becomes NVFP4 without loss: two blocks of 16
per block of 32, whose scale is a power of two in E4M3, times a power of two per row
(`mxfp4_blocks.py`). That needs the exponents of a row's blocks to be within 17 of the largest."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from halfbyte.dispatch import Answer
from halfbyte.kernels.cpu.library import is_built
from halfbyte.linear.ops import linear_op
from halfbyte.linear.w4a16.cpu import CpuPackedWeight, linear_cpu, pack_weight, unpack_weight
from halfbyte.moe.base import MoeConfig, OperatorKernel
from halfbyte.moe.experts import ExpertMatrices, GatedActivation, PackedExperts
from halfbyte.moe.grouping import hit_experts, weighted_sum
from halfbyte.moe.mxfp4_blocks import as_nvfp4


@linear_op("nvfp4_moe_cpu")
def nvfp4_moe_cpu(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_codes: torch.Tensor,
    gate_up_blocks: torch.Tensor,
    gate_up_row_scales: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_codes: torch.Tensor,
    down_blocks: torch.Tensor,
    down_row_scales: torch.Tensor,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """The experts of a layer.

    Args:
        x: `[M, H]`.
        topk_ids, topk_weights: `[M, top_k]`.
        gate_up_codes, gate_up_blocks, gate_up_row_scales: of a `CpuPackedWeight` each, `[E, ...]`.
        gate_up_bias: `[E, 2 * I]` or None.
        down_codes, down_blocks, down_row_scales, down_bias: the same of down.
        alpha, limit, up_offset, interleaved: of the `GatedActivation`.
        n: H.
        batch_invariant: a token's bits do not depend on the other tokens.
    """
    activation = GatedActivation(alpha, limit, up_offset, interleaved)
    num_experts = gate_up_row_scales.shape[0]
    gate_up = (gate_up_codes, gate_up_blocks, gate_up_row_scales)
    down = (down_codes, down_blocks, down_row_scales)
    results = x.new_zeros((topk_ids.numel(), n))
    for expert, pairs in hit_experts(topk_ids, num_experts):
        rows = x[pairs // topk_ids.shape[1]]
        rows = _product(rows, gate_up, gate_up_bias, expert, batch_invariant)
        rows = activation(rows.float()).to(x.dtype)
        results[pairs] = _product(rows, down, down_bias, expert, batch_invariant)
    return weighted_sum(results, topk_weights, topk_ids, num_experts).to(x.dtype)


def _product(
    rows: torch.Tensor,
    packed: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    expert: int,
    batch_invariant: bool,
) -> torch.Tensor:
    weight = CpuPackedWeight(*(tensor[expert] for tensor in packed))
    own = None if bias is None else bias[expert]
    return linear_cpu(rows, weight, own, batch_invariant=batch_invariant)


class CpuKernel(OperatorKernel):
    """`linear_cpu` per expert; built with the package.

    Its tensors, for `gate_up` and `down`: codes and blocks in the order of `CpuPackedWeight`, a
    float32 scale per row, the bias, and as loaded the small tensors that `restore` needs.
    """

    name: ClassVar[str] = "cpu"
    product = staticmethod(nvfp4_moe_cpu)
    parts: ClassVar[tuple[str, ...]] = ("codes", "blocks", "row_scales", "bias")

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Wherever the kernel was built; every machine has a CPU."""
        return is_built("streams the experts that are hit")

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every shape, on the CPU."""
        if config.device_type != "cpu":
            return False, f"tensors are on {config.device_type}, not on the CPU"
        return True, "every shape, batch-invariant"

    def prepare(self, experts: PackedExperts) -> dict[str, torch.Tensor]:
        """Transpose codes and block scales.

        Raises:
            ValueError: MXFP4 blocks of a row whose exponents are too far apart.
        """
        gate_up = _prepared("gate_up", experts.gate_up, experts.activation.interleaved)
        return gate_up | _prepared("down", experts.down, False)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """The same bytes in the order as loaded."""
        hidden, intermediate = self.config.hidden_size, self.config.intermediate_size
        gate_up = _restored("gate_up", tensors, 2 * intermediate, hidden)
        down = _restored("down", tensors, hidden, intermediate)
        return PackedExperts(gate_up, down, self.config.activation)


def _prepared(name: str, matrices: ExpertMatrices, interleaved: bool) -> dict[str, torch.Tensor]:
    if matrices.format == "mxfp4":
        scales, row_scales = as_nvfp4(matrices.weight, matrices.scales, name)
        loaded = matrices.scales
    else:
        assert matrices.global_scale is not None
        scales, row_scales = matrices.scales, matrices.row_scales(interleaved)
        loaded = matrices.global_scale
    e = matrices.num_experts
    # N is a multiple of a strip's rows, so that no strip has rows of two experts.
    codes, blocks = pack_weight(matrices.weight.flatten(0, 1), scales.flatten(0, 1))
    tensors = {
        f"{name}_codes": codes.unflatten(0, (e, -1)),
        f"{name}_blocks": blocks.unflatten(0, (e, -1)),
        f"{name}_row_scales": row_scales.contiguous(),
        f"{name}_loaded_scale": loaded,
    }
    if matrices.bias is not None:
        tensors[f"{name}_bias"] = matrices.bias.contiguous()
    return tensors


def _restored(name: str, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> ExpertMatrices:
    codes, blocks = tensors[f"{name}_codes"], tensors[f"{name}_blocks"]
    e, loaded = codes.shape[0], tensors[f"{name}_loaded_scale"]
    weight, scales = unpack_weight(codes.flatten(0, 1), blocks.flatten(0, 1), e * n, k)
    weight, scales = weight.unflatten(0, (e, n)), scales.unflatten(0, (e, n))
    bias = tensors.get(f"{name}_bias")
    if loaded.dtype == torch.uint8:
        return ExpertMatrices(weight, loaded, None, bias)
    return ExpertMatrices(weight, scales, loaded, bias)
