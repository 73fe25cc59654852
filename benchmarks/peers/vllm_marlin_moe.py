"""vLLM's Marlin for experts, `fused_marlin_moe`, on NVFP4 and MXFP4; vLLM 0.24 and later.

Called as vLLM's `MarlinExperts` calls it, except that the locks are allocated once and x is padded
ahead, both to Marlin's advantage. For MXFP4, vLLM pads H and I (2880 to 3072 and 2944).
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from benchmarks.peers.moe import MoePeer, one_scale_per_expert, takes_bf16, vllm_activation
from benchmarks.peers.moe_padding import padded_experts, padded_tokens
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer
from halfbyte.moe import MoeConfig, PackedExperts

_LOCKS_PER_SM = 4


class MarlinPeer(MoePeer):
    """Products with 4-bit weights, tokens sorted by `moe_align_block_size`."""

    name: ClassVar[str] = "vllm_marlin"

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Sizes that its tiles divide; MXFP4 with gate and up interleaved is padded to them."""
        if config.weight_format == "nvfp4" and config.hidden_size % 64:
            return False, f"NVFP4 with H in multiples of 64, not {config.hidden_size}"
        if config.weight_format == "nvfp4" and (config.has_bias or config.activation.interleaved):
            return False, "NVFP4 without biases, with gate before up"
        if config.weight_format == "mxfp4" and not config.activation.interleaved:
            return False, "MXFP4 with gate and up interleaved"
        return takes_bf16(config)

    def prepare(self, experts: RandomExperts) -> dict[str, torch.Tensor | None]:
        """Keyword arguments of `fused_marlin_moe`."""
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (
            marlin_make_workspace_new,
        )

        form = _nvfp4 if self.config.weight_format == "nvfp4" else self._mxfp4
        locks = marlin_make_workspace_new(experts.device, _LOCKS_PER_SM)
        return form(experts.packed) | {"workspace": locks}

    def _mxfp4(self, packed: PackedExperts) -> dict[str, torch.Tensor | None]:
        packed = padded_experts(packed, *self._sizes())
        return _mxfp4(packed, self.config.dtype)

    def _sizes(self) -> tuple[int, int]:
        """H and I as vLLM pads them; NVFP4's I is padded by vLLM's own preparation."""
        sizes = self.config.hidden_size, self.config.intermediate_size
        if self.config.weight_format == "nvfp4":
            return sizes
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
            Mxfp4MoeBackend,
            mxfp4_round_up_hidden_size_and_intermediate_size,
        )

        hidden, intermediate = mxfp4_round_up_hidden_size_and_intermediate_size(
            Mxfp4MoeBackend.MARLIN, *sizes
        )
        return hidden, intermediate

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x, padded as the weights are."""
        return padded_tokens(x, self._sizes()[0])

    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `MoePeer.apply`."""
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        out = torch.empty_like(x)
        fused_marlin_moe(
            hidden_states=x,
            topk_weights=weights,
            topk_ids=ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            activation=vllm_activation(self.config.activation),
            moe_sum=ops.moe_sum,
            output=out,
            **form,
        )
        return out[:, : self.config.hidden_size]


def _nvfp4(packed: PackedExperts) -> dict[str, torch.Tensor | None]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_nvfp4_moe_layer_for_marlin,
    )

    gate_up, down = packed.gate_up, packed.down
    assert gate_up.global_scale is not None
    assert down.global_scale is not None
    layer: Any = SimpleNamespace(
        num_experts=packed.num_experts,
        hidden_size=packed.hidden_size,
        intermediate_size_per_partition=packed.intermediate_size,
        params_dtype=torch.bfloat16,
    )
    w1, w1_scale, global_scale1, w2, w2_scale, global_scale2 = prepare_nvfp4_moe_layer_for_marlin(
        layer=layer,
        w13=gate_up.weight,
        w13_scale=gate_up.scales,
        w13_scale_2=one_scale_per_expert(gate_up.global_scale),
        w2=down.weight,
        w2_scale=down.scales,
        w2_scale_2=one_scale_per_expert(down.global_scale),
        is_act_and_mul=True,
    )
    return {
        "w1": w1,
        "w2": w2,
        "bias1": None,
        "bias2": None,
        "w1_scale": w1_scale,
        "w2_scale": w2_scale,
        "global_scale1": global_scale1,
        "global_scale2": global_scale2,
    }


def _mxfp4(packed: PackedExperts, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_moe_mxfp4_layer_for_marlin,
    )

    layer: Any = SimpleNamespace(params_dtype=dtype)
    gate_up, down = packed.gate_up, packed.down
    w1, w2, w1_scale, w2_scale, bias1, bias2 = prepare_moe_mxfp4_layer_for_marlin(
        layer=layer,
        w13=gate_up.weight,
        w2=down.weight,
        w13_scale=gate_up.scales,
        w2_scale=down.scales,
        w13_bias=gate_up.bias,
        w2_bias=down.bias,
    )
    return {
        "w1": w1,
        "w2": w2,
        "bias1": bias1,
        "bias2": bias2,
        "w1_scale": w1_scale,
        "w2_scale": w2_scale,
    }
