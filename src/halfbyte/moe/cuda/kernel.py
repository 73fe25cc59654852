"""CUDA C++ for experts on the weights as loaded: from SM80 a streaming kernel for few tokens per
expert, on SM90 also a `wgmma` GEMM for more; otherwise Triton's.

Shapes alone decide (`_variant`), so that a call can be captured in a CUDA graph. The variants sum
in different orders, so batch-invariant layers are left to the backend `triton`. `launcher.py` and
`gemm_sm90/launcher.py` launch them; the second also uses functions of the first."""

from functools import lru_cache
from typing import ClassVar, Literal

import torch

from halfbyte.dispatch import Answer, missing_module
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.moe.as_loaded import AsLoadedKernel, MatrixTensors, as_loaded_op, matrices_of
from halfbyte.moe.base import MoeConfig
from halfbyte.moe.cuda import launcher as streamed
from halfbyte.moe.cuda.gemm_sm90 import launcher as gemm
from halfbyte.moe.cuda.gemm_sm90.plan import MAX_PAIRS, choose_tokens
from halfbyte.moe.cuda.launcher import work_of
from halfbyte.moe.cuda.plan import MAX_EXPERTS, SIZE_MULTIPLE, Work, is_small
from halfbyte.moe.experts import GatedActivation, PackedExperts
from halfbyte.moe.triton import TritonKernel

_MAX_MEAN_BESIDE_GEMM = 5
"""Max mean of tokens per expert for which `experts.cu` runs on SM90. On an H200 with a mean of 4 a
layer of Qwen3-30B-A3B takes 113 µs (`gemm.cu` 122), one of GPT-OSS-20B 152 (176); with a mean of 6
135 (125) and 178 (180): `benchmarks/results/moe_gemm_lines.json`. 5 lies between, unmeasured."""


@as_loaded_op("nvfp4_moe_cuda")
def nvfp4_moe_cuda(
    x: torch.Tensor,
    gate_up: MatrixTensors,
    down: MatrixTensors,
    activation: GatedActivation,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    batch_invariant: bool,
) -> torch.Tensor:
    """The kernels that `_variant` chooses, as an operator."""
    arguments = x, gate_up, down, activation, topk_ids, topk_weights
    if not batch_invariant:
        works = work_of(gate_up, activation), work_of(down, None)
        variant = _variant(topk_ids.numel(), works, x.get_device())
        if variant != "triton":
            return (streamed if variant == "streaming" else gemm).run(*arguments)
    # Imported here: the registry must not need Triton.
    from halfbyte.moe.triton_launcher import moe_triton

    return moe_triton(*arguments, batch_invariant)


@lru_cache(maxsize=4096)
def _variant(
    num_pairs: int, works: tuple[Work, Work], device: int
) -> Literal["streaming", "gemm", "triton"]:
    """The kernels for so many pairs: `experts.cu`, `gemm.cu` or Triton's."""
    gpu, num_experts = gpu_of(device), works[0].num_experts
    tokens = None
    if gpu.compute_capability == 90 and num_pairs <= MAX_PAIRS:
        tokens = choose_tokens(works, num_pairs, gpu.block_bytes, gpu.num_sms)
    is_faster = tokens is None or num_pairs <= _MAX_MEAN_BESIDE_GEMM * num_experts
    if is_small(num_pairs, num_experts) and is_faster:
        return "streaming"
    return "triton" if tokens is None else "gemm"


class CudaKernel(AsLoadedKernel):
    """`experts.cu` for few tokens per expert; for more `gemm.cu` on SM90 and Triton elsewhere."""

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
        """What Triton can do, with 16-bit activations and sizes in multiples of 32, and not
        batch-invariant."""
        answer = TritonKernel.can_implement(config)
        if not answer[0]:
            return answer
        if config.dtype == torch.float32:
            return False, "takes bfloat16 and float16, not float32"
        if config.batch_invariant:
            return False, "not batch-invariant: kernels, chosen by M, sum in different orders"
        if config.hidden_size % SIZE_MULTIPLE or config.intermediate_size % SIZE_MULTIPLE:
            sizes = f"{config.hidden_size} and {config.intermediate_size}"
            return False, f"sizes in multiples of {SIZE_MULTIPLE}, not {sizes}"
        if config.num_experts > MAX_EXPERTS:
            return False, f"up to {MAX_EXPERTS} experts, not {config.num_experts}"
        return True, "for few tokens per expert, on SM90 also for more; Triton elsewhere"

    def prepare(self, experts: PackedExperts) -> dict[str, torch.Tensor]:
        """The tensors as loaded, and the kernels compiled."""
        tensors = {
            name: tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
            for name, tensor in super().prepare(experts).items()
        }
        if experts.device.type == "cuda":
            gate_up, down = matrices_of(tensors, "gate_up"), matrices_of(tensors, "down")
            device = experts.device.index or 0
            streamed.compile_experts(gate_up, down, experts.activation, self.config.dtype, device)
            if gpu_of(device).compute_capability == 90:
                gemm.compile_gemm(gate_up, down, experts.activation, self.config.dtype, device)
        return tensors
