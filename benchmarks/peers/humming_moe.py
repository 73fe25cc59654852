"""Humming's grouped product for experts, around it vLLM's sort, activation and sum.

As vLLM's `HummingIndexedExperts` composes them (vLLM 0.24 and later), with 16-bit activations. K
may be split, Humming's default and its best speed.
"""

import json
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.peers.moe import MoePeer, one_scale_per_expert, takes_bf16, vllm_activation
from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer
from halfbyte.linear.w4a16.humming import HummingKernel
from halfbyte.moe import ExpertMatrices, MoeConfig
from halfbyte.moe.experts import BLOCK_SIZES

_COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
_TILE_N, _TILE_K = 256, 128
"""Padding for Humming, as vLLM's."""
_NUM_LOCKS = 2048


class _Tuned(NamedTuple):
    """Humming's choice of a kernel."""

    max_pairs: int
    block_size: int
    """Pairs of a block, which are of one expert."""
    config: str


class HummingPeer(MoePeer):
    """`humming_gemm` of type `indexed` for gate_up and for down."""

    name: ClassVar[str] = "humming"

    @classmethod
    def missing(cls) -> str | None:
        """Humming and vLLM."""
        return HummingKernel.missing() or super().missing()

    @classmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Every size."""
        return takes_bf16(config)

    def prepare(self, experts: RandomExperts) -> dict[str, Any]:
        """Repacked weights of both products, and locks."""
        device, packed = experts.device, experts.packed
        return {
            "gate_up": _repacked(packed.gate_up, self.config.dtype),
            "down": _repacked(packed.down, self.config.dtype),
            "locks": torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=device),
        }

    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `MoePeer.apply`."""
        from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        pairs, config = ids.numel(), self.config
        sorted_ids = _Sorted(ids, config.num_experts)
        gate_up = x.new_empty((pairs, 2 * config.intermediate_size))
        sorted_ids.product(form["gate_up"], x, gate_up, ids.shape[1], form["locks"])
        middle = x.new_empty((pairs, config.intermediate_size))
        apply_moe_activation(vllm_activation(config.activation), middle, gate_up)
        results = x.new_empty((pairs, config.hidden_size))
        sorted_ids.product(form["down"], middle, results, 1, form["locks"])
        out = torch.empty_like(x)
        moe_fused_mul_sum(
            inputs=results.view(*ids.shape, -1), topk_weights=weights, outputs=out, topk_ids=ids
        )
        return out


class _Sorted:
    """Pairs sorted by expert, once per size of blocks."""

    def __init__(self, ids: torch.Tensor, num_experts: int) -> None:
        self.ids, self.num_experts = ids, num_experts
        self._by_block_size: dict[int, Any] = {}

    def product(
        self,
        matrices: dict[str, Any],
        x: torch.Tensor,
        out: torch.Tensor,
        top_k: int,
        locks: torch.Tensor,
    ) -> None:
        """Write `[pairs, N]` to out; x has a row per token, or with top_k = 1 per pair."""
        pairs = self.ids.numel()
        tuned = next(tuned for tuned in matrices["tuned"] if pairs <= tuned.max_pairs)
        sorted_ids, expert_ids, num_padded = self._blocks(tuned.block_size)
        import_module("humming.ops").humming_gemm(
            layer_config=matrices["layer_config"],
            compute_config=json.dumps(_COMPUTE),
            # Without it, Humming compiles some 30 kernels, for all numbers of pairs.
            tuning_config=tuned.config,
            inputs=x,
            outputs=out,
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=num_padded,
            locks=locks,
            top_k=top_k,
            valid_shape_m=pairs,
            **matrices["tensors"],
        )

    def _blocks(self, size: int) -> Any:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        if size not in self._by_block_size:
            self._by_block_size[size] = moe_align_block_size(
                topk_ids=self.ids,
                block_size=size,
                num_experts=self.num_experts,
                ignore_invalid_experts=True,
            )
        return self._by_block_size[size]


def _repacked(matrices: ExpertMatrices, dtype: torch.dtype) -> dict[str, Any]:
    """`layer_config`, `tensors` in Humming's order, and `tuned`, by number of pairs."""
    dtypes, schema = import_module("humming.dtypes"), import_module("humming.schema")
    enums, transform = import_module("humming.config"), import_module("humming.transform")
    is_nvfp4 = matrices.global_scale is not None
    scale_type = enums.WeightScale2Type.TENSOR if is_nvfp4 else enums.WeightScale2Type.NONE
    weight_schema = schema.HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3 if is_nvfp4 else dtypes.float8e8m0,
        weight_scale_group_size=BLOCK_SIZES[matrices.format],
        weight_scale_type=enums.WeightScaleType.GROUP,
        weight_scale_2_type=scale_type,
    )
    scales = matrices.scales if is_nvfp4 else matrices.scales.view(torch.float8_e8m0fnu)
    tensors = {"weight": matrices.weight.view(torch.int32), "weight_scale": scales}
    if matrices.global_scale is not None:
        tensors["weight_scale_2"] = one_scale_per_expert(matrices.global_scale)
    if matrices.bias is not None:
        tensors["bias"] = matrices.bias.to(dtype)
    layer_config: Any
    layer_config, tensors = transform.prepare_and_transform_humming_tensors(
        tensors=tensors,
        shape_n=matrices.n,
        shape_k=matrices.k,
        weight_schema=weight_schema,
        num_experts=matrices.num_experts,
        pad_n_to_multiple=_TILE_N,
        pad_k_to_multiple=_TILE_K,
        has_bias=matrices.bias is not None,
        torch_dtype=dtype,
        device=matrices.weight.device,
    )
    tuned = import_module("humming.tune").get_heuristics_config(
        layer_config, device=matrices.weight.device, **_COMPUTE
    )
    return {
        "layer_config": layer_config.to_str(),
        "tensors": tensors,
        "tuned": [_Tuned(end, one["block_shape"][0], json.dumps(one)) for _, end, one in tuned],
    }
