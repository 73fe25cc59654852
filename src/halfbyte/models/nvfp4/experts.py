"""Experts of MoE models, which transformers fuses into two 3-D parameters.

Files hold gate, up and down projections per expert. NVFP4 and MXFP4 experts become one module
(`SeparateExperts`) that runs them together as W4A16. Others become an `ExpertList`, whose linear
layers are named as in the files and run expert by expert: experts in FP8, W4A4 experts, and experts
with another activation than SwiGLU's.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation

from halfbyte.moe import SWIGLU, GatedActivation
from halfbyte.moe.separate_experts import PROJECTIONS

__all__ = [
    "PROJECTIONS",
    "Expert",
    "ExpertList",
    "FusedExperts",
    "fused_experts",
    "has_concatenated_experts",
]


class FusedExperts(NamedTuple):
    """Sizes, biases and activation of a module of fused experts.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        has_bias: whether projections have biases.
        activation: of `NvFp4Experts` with its weights; None for another one.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_bias: bool
    activation: GatedActivation | None

    def layers(self, name: str) -> list[tuple[str, int, int]]:
        """(name, N, K) of the projections of all experts of the module `name`."""
        gate_up, down = (
            (self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        )
        return [
            (f"{name}.{expert}.{projection}", *(down if projection == "down_proj" else gate_up))
            for expert in range(self.num_experts)
            for projection in PROJECTIONS
        ]


def fused_experts(module: nn.Module) -> FusedExperts | None:
    """A module's fused experts; None for other modules.

    Known are gate before up without biases (Qwen, Mixtral) and GPT-OSS's, which are transposed and
    interleaved, with biases and a clamped activation.
    """
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if has_concatenated_experts(module):
        assert isinstance(gate_up, nn.Parameter)
        num_experts, both, hidden_size = gate_up.shape
        activation = SWIGLU if isinstance(module.act_fn, SiLUActivation | nn.SiLU) else None
        return FusedExperts(num_experts, hidden_size, both // 2, False, activation)
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    is_gpt_oss = (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and isinstance(getattr(module, "gate_up_proj_bias", None), nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and gate_up.shape[2] == 2 * down.shape[1]
        and isinstance(alpha, float)
        and isinstance(limit, float)
    )
    if not is_gpt_oss:
        return None
    assert isinstance(down, nn.Parameter)
    assert alpha is not None
    num_experts, intermediate_size, hidden_size = down.shape
    activation = GatedActivation(alpha, limit, up_offset=1.0)
    return FusedExperts(num_experts, hidden_size, intermediate_size, True, activation)


class Expert(nn.Module):
    """One expert: `down(act(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj: nn.Module = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj: nn.Module = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj: nn.Module = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` to the same."""
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class ExpertList(nn.ModuleList):
    """A module per expert, with the forward signature of transformers' fused experts."""

    @classmethod
    def like(cls, fused: nn.Module) -> "ExpertList":
        """Unquantized experts with the sizes, dtype and device of fused ones."""
        gate_up, act_fn = fused.gate_up_proj, fused.act_fn
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(act_fn, nn.Module)
        num_experts, both, hidden_size = gate_up.shape
        experts = cls(Expert(hidden_size, both // 2, act_fn) for _ in range(num_experts))
        return experts.to(gate_up.dtype)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts, as transformers computes it.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: int64 `[tokens, k]`, experts; `len(self)` means no expert.
            top_k_weights: `[tokens, k]`.
        """
        result = torch.zeros_like(hidden_states)
        choices, weights = top_k_index.flatten(), top_k_weights.flatten()
        by_expert = choices.argsort(stable=True)
        # The only sync with the device: tokens per expert.
        counts = choices.bincount(minlength=len(self) + 1)[: len(self)].tolist()
        start = 0
        for expert, count in zip(self, counts, strict=True):
            chosen = by_expert[start : start + count]
            start += count
            if count:
                token = chosen // top_k_index.shape[-1]
                out = expert(hidden_states[token]) * weights[chosen, None]
                result.index_add_(0, token, out.to(result.dtype))
        return result


def has_concatenated_experts(module: nn.Module) -> bool:
    """Whether a module has experts in two 3-D parameters, gate before up, without biases.

    GPT-OSS's are interleaved, see `fused_experts`.
    """
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and gate_up.shape[1] == 2 * down.shape[2]
        and gate_up.shape[2] == down.shape[1]
        and isinstance(getattr(module, "act_fn", None), nn.Module)
        and not hasattr(module, "gate_up_proj_bias")
    )
