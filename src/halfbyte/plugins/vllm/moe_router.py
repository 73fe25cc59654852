"""The gate and the top-k of vLLM's MoE layers as one kernel, beside halfbyte's experts.

vLLM's runner of a MoE layer (`MoERunner`) calls its gate, then its router with the logits. A runner
that `fuse_router` has changed passes hidden states on as logits, and its router does both. Models
that call their gates themselves keep vLLM's kernels.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from halfbyte.moe import route
from halfbyte.moe.router import fits_kernel, prepare_kernel
from halfbyte.plugins.vllm.attention import batch_invariant
from halfbyte.plugins.vllm.moe_method import HalfbyteMoeMethod


def fuse_router(runner: Any) -> None:
    """Give a `MoERunner` the fused router if its experts are halfbyte's and its router fits.

    It must be a softmax over all experts by a gate in 16 bits that the runner itself calls.
    `fits_kernel` decides per call, so that GPUs before SM90, CPUs and long prompts keep vLLM's.
    """
    if not isinstance(runner.routed_experts.quant_method, HalfbyteMoeMethod):
        return
    if runner.routed_experts.quant_method.is_monolithic or batch_invariant():
        return
    gate, router = runner.gate, runner.router
    if gate is None or getattr(runner, "_fse_fuse_gate", False):
        return
    if type(router) is FusedTopKRouter and router.scoring_func == "softmax" and _is_plain(gate):
        runner.router = GateAndTopK.of(router, gate)
        runner.gate = LaterGate()


def _is_plain(gate: Any) -> bool:
    """Whether a gate is a product with weights of 16 bits, without bias."""
    return (
        isinstance(gate, ReplicatedLinear)
        and isinstance(gate.quant_method, UnquantizedLinearMethod)
        and gate.bias is None
        and gate.weight.dtype in (torch.bfloat16, torch.float16)
        and getattr(gate, "out_dtype", None) in (None, gate.weight.dtype)
    )


class LaterGate(nn.Module):
    """In the runner's place for the gate: passes hidden states on as logits."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hidden states, and no bias."""
        return hidden_states, None


class GateAndTopK(FusedTopKRouter):
    """vLLM's router, which also multiplies by the gate; made by `of`."""

    gate: ReplicatedLinear
    """The layer's; the model owns its weights."""

    @classmethod
    def of(cls, router: FusedTopKRouter, gate: ReplicatedLinear) -> "GateAndTopK":
        """In the place of vLLM's router and gate.

        Args:
            router: vLLM's.
            gate: the layer's.
        """
        fused = cls(
            router.top_k,
            router.global_num_experts,
            router.scoring_func,
            router.renormalize,
            router.eplb_state,
        )
        fused.gate = gate
        # No graph may be captured while it is compiled.
        prepare_kernel(gate.weight, router.top_k)
        return fused

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and ids `[M, top_k]`; `router_logits` are what the gate multiplies."""
        gate = self.gate.weight
        if not fits_kernel(router_logits, gate, self.top_k):
            logits, _ = self.gate(router_logits)
            return super()._compute_routing(hidden_states, logits, indices_type, **more)
        padding = _padding_mask(len(router_logits))
        return route(router_logits, gate, self.top_k, renormalize=self.renormalize, padding=padding)


def _padding_mask(tokens: int) -> torch.Tensor | None:
    """vLLM's mask of the tokens that pad a CUDA graph; None in versions without it."""
    mask_of = getattr(fused_topk_router, "_get_padding_mask", None)
    return None if mask_of is None else mask_of(tokens)
