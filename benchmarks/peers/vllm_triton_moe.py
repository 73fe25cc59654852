"""vLLM's Triton kernel for experts, `fused_experts`, with bfloat16 weights; vLLM 0.24 and later."""

from typing import Any, ClassVar

import torch

from benchmarks.peers.moe import MoePeer, takes_bf16, vllm_activation
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer
from halfbyte.moe import MoeConfig


class TritonPeer(MoePeer):
    """Dequantized weights, tiles as vLLM chooses them for the GPU."""

    name: ClassVar[str] = "vllm_bf16"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every size."""
        return takes_bf16(config)

    def prepare(self, experts: RandomExperts) -> dict[str, torch.Tensor | None]:
        """Dequantized weights, and biases."""
        packed, (gate_up, down) = experts.packed, experts.dense
        biases = {"w1_bias": packed.gate_up.bias, "w2_bias": packed.down.bias}
        return {"w1": gate_up, "w2": down, **biases}

    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `MoePeer.apply`."""
        from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        result: torch.Tensor = fused_experts(
            hidden_states=x,
            w1=form["w1"],
            w2=form["w2"],
            topk_weights=weights,
            topk_ids=ids,
            activation=vllm_activation(self.config.activation),
            quant_config=biased_moe_quant_config(form["w1_bias"], form["w2_bias"]),
        )
        return result
