"""Triton on NVIDIA GPUs from SM80: the general kernel, on the weights as loaded."""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.linear.ops import linear_op
from halfbyte.linear.runs import matrix_of
from halfbyte.moe.as_loaded import AsLoadedKernel, Matrices
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.experts import GatedActivation

_OLDEST = 80


@linear_op("nvfp4_moe_triton")
def nvfp4_moe_triton(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_global_scale: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_scales: torch.Tensor,
    down_global_scale: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    n: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """`moe_triton` as an operator; n is H."""
    # Imported here: other backends must not need Triton.
    from halfbyte.moe.triton_launcher import moe_triton

    gate_up = Matrices(gate_up_weight, gate_up_scales, gate_up_global_scale, gate_up_bias)
    down = Matrices(down_weight, down_scales, down_global_scale, down_bias)
    return moe_triton(
        matrix_of(x),
        gate_up,
        down,
        GatedActivation(alpha, limit, up_offset, interleaved),
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        batch_invariant,
    )


class TritonKernel(AsLoadedKernel):
    """`moe_triton`; compiled at first use."""

    name: ClassVar[str] = "triton"
    product = staticmethod(nvfp4_moe_triton)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where Triton is installed."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: missing_module("triton", "pip install halfbyte[gpu]"),
            "decodes weights as loaded",
        )

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every shape; MXFP4 not in float16."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.weight_format == "mxfp4" and config.dtype == torch.float16:
            return False, "MXFP4's powers of two exceed float16's range"
        return True, "every shape, batch-invariant"
