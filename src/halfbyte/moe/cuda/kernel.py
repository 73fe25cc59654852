"""CUDA C++ on NVIDIA GPUs from SM80 for few tokens per expert, Triton for more; weights as loaded.

The number of pairs decides (`plan.is_small`), so that a call can be captured in a CUDA graph. The
two sum in different orders: a batch-invariant layer is Triton's."""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer, missing_module, runs_on_gpu
from halfbyte.linear.ops import linear_op
from halfbyte.linear.runs import matrix_of
from halfbyte.moe.as_loaded import AsLoadedKernel, Matrices, matrices_of
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.cuda.launcher import compile_experts, moe_cuda
from halfbyte.moe.cuda.plan import MAX_EXPERTS, SIZE_MULTIPLE, is_small
from halfbyte.moe.experts import GatedActivation, PackedExperts
from halfbyte.moe.triton import nvfp4_moe_triton

_OLDEST = 80


@linear_op("nvfp4_moe_cuda")
def nvfp4_moe_cuda(
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
    """`moe_cuda` or `moe_triton` as an operator; n is H."""
    gate_up = Matrices(gate_up_weight, gate_up_scales, gate_up_global_scale, gate_up_bias)
    down = Matrices(down_weight, down_scales, down_global_scale, down_bias)
    if not is_small(topk_ids.numel(), gate_up_weight.shape[0]) or batch_invariant:
        return nvfp4_moe_triton(
            x,
            topk_ids,
            topk_weights,
            *gate_up,
            *down,
            alpha,
            limit,
            up_offset,
            interleaved,
            n,
            batch_invariant,
        )
    return moe_cuda(
        _aligned(x),
        gate_up,
        down,
        GatedActivation(alpha, limit, up_offset, interleaved),
        topk_ids.contiguous(),
        topk_weights.contiguous(),
    )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`[M, K]`, contiguous, from a multiple of 16 bytes."""
    x = matrix_of(x)
    return x if x.data_ptr() % 16 == 0 else x.clone()


class CudaKernel(AsLoadedKernel):
    """`moe_cuda` for few tokens, `moe_triton` for more."""

    name: ClassVar[str] = "cuda"
    product = staticmethod(nvfp4_moe_cuda)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On SM80 and later; on this machine also where NVRTC and Triton can be reached."""
        return runs_on_gpu(
            compute_capability,
            _OLDEST,
            lambda: (
                missing_module("cuda.bindings", "CUDA builds of PyTorch install it")
                or missing_module("triton", "pip install halfbyte[gpu]")
            ),
            "streams weights as loaded",
        )

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """16-bit activations, sizes in multiples of 32, not batch-invariant."""
        if config.device_type != "cuda":
            return False, f"tensors are on {config.device_type}, not on a GPU"
        if config.dtype == torch.float32:
            return False, "takes bfloat16 and float16, not float32"
        if config.weight_format == "mxfp4" and config.dtype == torch.float16:
            return False, "MXFP4's powers of two exceed float16's range"
        if config.batch_invariant:
            return False, "not batch-invariant: the number of tokens decides between two kernels"
        if config.hidden_size % SIZE_MULTIPLE or config.intermediate_size % SIZE_MULTIPLE:
            sizes = f"{config.hidden_size} and {config.intermediate_size}"
            return False, f"sizes in multiples of {SIZE_MULTIPLE}, not {sizes}"
        if config.num_experts > MAX_EXPERTS:
            return False, f"up to {MAX_EXPERTS} experts, not {config.num_experts}"
        return True, "streams weights once for few tokens per expert, Triton for more"

    def prepare(self, experts: PackedExperts) -> dict[str, torch.Tensor]:
        """The tensors as loaded, and the kernels compiled."""
        tensors = {
            name: tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
            for name, tensor in super().prepare(experts).items()
        }
        if experts.device.type == "cuda":
            gate_up, down = matrices_of(tensors, "gate_up"), matrices_of(tensors, "down")
            device = experts.device.index or 0
            compile_experts(gate_up, down, experts.activation, self.config.dtype, device)
        return tensors
