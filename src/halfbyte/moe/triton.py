"""Triton on NVIDIA GPUs from SM80: the general kernel, on the weights as loaded.

`triton_launcher.py` imports Triton. This file does not, because `auto` asks the backend also where
Triton is not installed.
"""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer, runs_on_triton
from halfbyte.moe.as_loaded import AsLoadedKernel, MatrixTensors, as_loaded_op
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.experts import GatedActivation


@as_loaded_op("nvfp4_moe_triton")
def nvfp4_moe_triton(
    x: torch.Tensor,
    gate_up: MatrixTensors,
    down: MatrixTensors,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool,
) -> torch.Tensor:
    """`moe_triton` as an operator."""
    # Imported here: other backends must not need Triton.
    from halfbyte.moe.triton_launcher import moe_triton

    return moe_triton(x, gate_up, down, activation, topk_ids, topk_weights, batch_invariant)


class TritonKernel(AsLoadedKernel):
    """`moe_triton`; compiled at first use."""

    name: ClassVar[str] = "triton"
    product = staticmethod(nvfp4_moe_triton)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where Triton is installed."""
        return runs_on_triton(compute_capability, "decodes weights as loaded")

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every shape; MXFP4 not in float16."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.weight_format == "mxfp4" and config.dtype == torch.float16:
            return False, "MXFP4's powers of two exceed float16's range"
        return True, "every shape, batch-invariant"
