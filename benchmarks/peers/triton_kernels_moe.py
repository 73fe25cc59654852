"""OpenAI's `triton_kernels` for GPT-OSS's experts, by vLLM's functions; vLLM 0.24 and later.

vLLM bundles the package. Timed from expert ids, as vLLM runs it for ids that another router chose;
weights of the router become bfloat16 there.
"""

from typing import Any, ClassVar

import torch

from benchmarks.peers.moe import MoePeer, takes_bf16, vllm_activation
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer
from halfbyte.moe import GPT_OSS, ExpertMatrices, MoeConfig


class TritonKernelsPeer(MoePeer):
    """`matmul_ogs` with the activation in the first product and the sum in the second."""

    name: ClassVar[str] = "triton_kernels"
    oldest: ClassVar[int] = 90

    @classmethod
    def missing(cls) -> str | None:
        """vLLM with the package."""
        if reason := super().missing():
            return reason
        try:
            from vllm.utils.import_utils import has_triton_kernels

            found = has_triton_kernels()
        except Exception as error:  # a build for another PyTorch may raise anything
            return f"vLLM cannot be imported: {error}"
        return None if found else "needs triton_kernels, which this vLLM lacks"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """MXFP4 with GPT-OSS's activation."""
        if config.weight_format != "mxfp4":
            return False, f"takes MXFP4, not {config.weight_format}"
        if config.activation != GPT_OSS:
            return False, "has GPT-OSS's activation only"
        if config.intermediate_size % 64:
            return False, f"I in multiples of 64, not {config.intermediate_size}"
        return takes_bf16(config)

    def prepare(self, experts: RandomExperts) -> dict[str, Any]:
        """Weights in the layout for this GPU, and vLLM's description of scales and biases."""
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config

        packed = experts.packed
        w1, w1_scale = _swizzled(packed.gate_up)
        w2, w2_scale = _swizzled(packed.down)
        biases = [None if m.bias is None else m.bias.float() for m in (packed.gate_up, packed.down)]
        return {
            "w1": w1,
            "w2": w2,
            "quant_config": mxfp4_w4a16_moe_quant_config(w1_scale, w2_scale, *biases),
        }

    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `MoePeer.apply`."""
        from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
            make_routing_data,
            triton_kernel_fused_experts,
        )

        routing, gather, scatter = make_routing_data(ids, weights, self.config.num_experts)
        result: torch.Tensor = triton_kernel_fused_experts(
            output_tensor=torch.empty_like(x),
            hidden_states=x,
            routing_data=routing,
            gather_indx=gather,
            scatter_indx=scatter,
            topk=ids.shape[1],
            activation=vllm_activation(self.config.activation),
            **form,
        )
        return result


def _swizzled(matrices: ExpertMatrices) -> tuple[Any, Any]:
    """Weights, and the `PrecisionConfig` with their scales."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    weight, flex, scale = _swizzle_mxfp4(matrices.weight, matrices.scales)
    return weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
