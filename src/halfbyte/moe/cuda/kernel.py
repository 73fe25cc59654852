"""CUDA C++ on NVIDIA GPUs from SM80 for few tokens per expert, Triton for more; weights as loaded.

The number of pairs decides (`plan.is_small`), so that a call can be captured in a CUDA graph. The
two sum in different orders: a batch-invariant layer is Triton's."""

from typing import ClassVar

import torch

from halfbyte.dispatch import Answer, missing_module
from halfbyte.moe.as_loaded import AsLoadedKernel, Matrices, as_loaded_op, matrices_of
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.cuda.launcher import compile_experts, moe_cuda
from halfbyte.moe.cuda.plan import MAX_EXPERTS, SIZE_MULTIPLE, is_small
from halfbyte.moe.experts import GatedActivation, PackedExperts
from halfbyte.moe.triton import TritonKernel


@as_loaded_op("nvfp4_moe_cuda")
def nvfp4_moe_cuda(
    x: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool,
) -> torch.Tensor:
    """`moe_cuda` or `moe_triton` as an operator."""
    if not batch_invariant and is_small(topk_ids.numel(), gate_up.weight.shape[0]):
        return moe_cuda(x, gate_up, down, activation, topk_ids, topk_weights)
    # Imported here: the registry must not need Triton.
    from halfbyte.moe.triton_launcher import moe_triton

    return moe_triton(x, gate_up, down, activation, topk_ids, topk_weights, batch_invariant)


class CudaKernel(AsLoadedKernel):
    """`moe_cuda` for few tokens, `moe_triton` for more."""

    name: ClassVar[str] = "cuda"
    product = staticmethod(nvfp4_moe_cuda)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Where Triton's is; on this machine also where NVRTC can be reached."""
        answer = TritonKernel.is_supported(compute_capability)
        if not answer[0] or compute_capability is not None:
            return answer
        missing = missing_module("cuda.bindings", "CUDA builds of PyTorch install it")
        return not missing, missing or "streams weights as loaded"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Of what Triton can do: 16-bit activations, sizes in multiples of 32, not
        batch-invariant."""
        answer = TritonKernel.can_implement(config)
        if not answer[0]:
            return answer
        if config.dtype == torch.float32:
            return False, "takes bfloat16 and float16, not float32"
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
