"""CUDA C++ for experts, packed at load (`packed.py`): from SM80 streaming kernels for one token and
for few tokens per expert, on SM90 also a `wgmma` GEMM for more; otherwise Triton's.

Shapes alone decide (`_variant`), so that a call can be captured in a CUDA graph. The variants sum
in different orders, so batch-invariant layers are left to the backend `triton`. `launcher.py`,
`token_launcher.py` and `gemm_sm90/launcher.py` launch them; the others also use functions of the
first."""

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from halfbyte.dispatch import Answer, missing_module
from halfbyte.linear.ops import linear_op
from halfbyte.linear.tensors import matrix_of
from halfbyte.linear.w4a16.gpu import gpu_of
from halfbyte.moe.base import MoeConfig, OperatorKernel
from halfbyte.moe.cuda import launcher as streamed
from halfbyte.moe.cuda import token_launcher as token
from halfbyte.moe.cuda.gemm_sm90 import launcher as gemm
from halfbyte.moe.cuda.gemm_sm90.plan import MAX_PAIRS
from halfbyte.moe.cuda.launcher import work_of
from halfbyte.moe.cuda.packed import (
    PackedMatrix,
    matrix_of_tensors,
    pack_matrices,
    unpack_matrices,
)
from halfbyte.moe.cuda.plan import MAX_EXPERTS, SIZE_MULTIPLE, Work, is_small
from halfbyte.moe.cuda.token_plan import is_faster_for_a_token, make_token_plan
from halfbyte.moe.experts import GatedActivation, PackedExperts, WeightFormat
from halfbyte.moe.triton import TritonKernel

_MAX_MEAN_BESIDE_GEMM: dict[WeightFormat, float] = {"nvfp4": 4.5, "mxfp4": 8}
"""Max mean of tokens per expert for which `experts.cu` runs on SM90. On an H200 a layer of
Qwen3-30B-A3B with a mean of 4 and 6 takes 95 and 110 µs (the GEMM 100 and 104), one of GPT-OSS-20B
with 8 142 (155): `benchmarks/results/moe_narrow_variants.json`, while the GEMM still sorted tokens
for its smallest tiles."""


@linear_op("nvfp4_moe_cuda")
def nvfp4_moe_cuda(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_global_scale: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_packed: torch.Tensor,
    down_global_scale: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    interleaved: bool,
    n: int,
    intermediate_size: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """The kernels that `_variant` chooses, as an operator."""
    assert not batch_invariant, "refused by can_implement"
    if not len(x):  # no kernel to choose, by tokens per expert
        return x.new_empty(x.shape)
    activation = GatedActivation(alpha, limit, up_offset, interleaved)
    sizes = 2 * intermediate_size, n
    gate_up = PackedMatrix(gate_up_packed, gate_up_global_scale, gate_up_bias, *sizes)
    down = PackedMatrix(down_packed, down_global_scale, down_bias, n, intermediate_size)
    works = work_of(gate_up, activation), work_of(down, None)
    variant = _variant(*topk_ids.shape, works, x.get_device())
    routing = topk_ids.contiguous(), topk_weights.contiguous()
    arguments = matrix_of(x), gate_up, down, activation, *routing
    if variant != "triton":
        return {"token": token, "streaming": streamed, "gemm": gemm}[variant].run(*arguments)
    # Imported here: the registry must not need Triton.
    from halfbyte.moe.triton_launcher import moe_triton

    return moe_triton(*arguments)


@lru_cache(maxsize=4096)
def _variant(
    m: int, top_k: int, works: tuple[Work, Work], device: int
) -> Literal["token", "streaming", "gemm", "triton"]:
    """The kernels for so many tokens: `token.cu`, `experts.cu`, `gemm.cu` or Triton's."""
    gpu, num_experts, num_pairs = gpu_of(device), works[0].num_experts, m * top_k
    fits = m == 1 and all(make_token_plan(work, top_k, gpu) for work in works)
    if fits and is_faster_for_a_token(works[0], top_k, gpu):
        return "token"
    max_beside_gemm = _MAX_MEAN_BESIDE_GEMM[works[0].weight_format] * num_experts
    has_gemm = gpu.compute_capability == 90 and num_pairs <= MAX_PAIRS
    is_faster = not has_gemm or num_pairs <= max_beside_gemm
    if is_small(num_pairs, num_experts) and is_faster:
        return "streaming"
    return "gemm" if has_gemm else "triton"


class CudaKernel(OperatorKernel):
    """`token.cu` and `experts.cu` for few tokens per expert; for more `gemm.cu` on SM90 and Triton
    elsewhere."""

    name: ClassVar[str] = "cuda"
    product = staticmethod(nvfp4_moe_cuda)
    parts: ClassVar[tuple[str, ...]] = ("packed", "global_scale", "bias")

    @property
    def options(self) -> dict[str, int]:
        """The size that packed tensors do not tell."""
        return {"intermediate_size": self.config.intermediate_size}

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Where Triton's is; on this machine also where NVRTC can be reached."""
        answer = TritonKernel.is_supported(compute_capability)
        if not answer[0] or compute_capability is not None:
            return answer
        missing = missing_module("cuda.bindings", "CUDA builds of PyTorch install it")
        return not missing, missing or "streams packed weights"

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
        """The tensors of `pack_matrices`, and the kernels compiled.

        Raises:
            ValueError: a block scale that is NaN or has a sign.
        """
        dtype, activation = self.config.dtype, experts.activation
        tensors = pack_matrices("gate_up", experts.gate_up, dtype, activation)
        tensors |= pack_matrices("down", experts.down, dtype)
        if experts.device.type == "cuda":
            gate_up = matrix_of_tensors("gate_up", tensors, experts.gate_up.n, experts.gate_up.k)
            down = matrix_of_tensors("down", tensors, experts.down.n, experts.down.k)
            device = experts.device.index or 0
            streamed.compile_experts(gate_up, down, activation, dtype, device)
            works = work_of(gate_up, activation), work_of(down, None)
            token.compile_token(works, dtype, device)
            if gpu_of(device).compute_capability == 90:
                gemm.compile_gemm(gate_up, down, activation, dtype, device)
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """The same bytes in the order as loaded."""
        config = self.config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        sizes = 2 * intermediate, hidden
        gate_up = unpack_matrices("gate_up", tensors, *sizes, config.dtype, config.activation)
        down = unpack_matrices("down", tensors, hidden, intermediate, config.dtype)
        return PackedExperts(gate_up, down, config.activation)
