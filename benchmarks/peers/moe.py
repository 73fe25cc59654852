"""Other projects' mixtures of experts: what a peer must answer, and the registry.

Peers get the same weights in values, repacked by their own functions where they have them. What a
peer does once per model (repacking, padding) is not timed; sorting tokens by expert is.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch

from halfbyte.bench.moe import RandomExperts
from halfbyte.dispatch import Answer, Registry, missing_module, runs_on_gpu
from halfbyte.measure.timing import Call
from halfbyte.moe import GPT_OSS, SWIGLU, GatedActivation, MoeConfig


class MoePeer(ABC):
    """Experts of one layer on another project's kernel."""

    name: ClassVar[str]
    oldest: ClassVar[int] = 80
    """Min compute capability."""

    def __init__(self, config: MoeConfig) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On NVIDIA GPUs, where the packages are installed."""
        return runs_on_gpu(compute_capability, cls.oldest, cls.missing, "installed")

    @classmethod
    def missing(cls) -> str | None:
        """What is not installed; by default vLLM."""
        return missing_module("vllm", "pip install vllm")

    @classmethod
    @abstractmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Whether it runs a layer, which is on a GPU."""

    @abstractmethod
    def prepare(self, experts: RandomExperts) -> Any:
        """The weights in the peer's layout; what `copy.deepcopy` copies."""

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x `[M, H]` as the peer takes it; not timed."""
        return x

    @abstractmethod
    def apply(
        self, form: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result `[M, H]`.

        Args:
            form: the result of `prepare`.
            x: the result of `inputs`.
            ids: int32 `[M, top_k]`.
            weights: float32 `[M, top_k]`.
        """

    def calls(self, experts: RandomExperts, x: torch.Tensor) -> list[Call]:
        """Calls over routings and copies of the weights, as `RandomExperts.calls`."""
        forms = experts.forms(self.name, partial(self.prepare, experts))
        x, routings = self.inputs(x), experts.routings(x.shape[0])
        return [
            partial(self.apply, forms[i % len(forms)], x, ids.int(), weights)
            for i, (ids, weights) in enumerate(routings)
        ]


MOE_PEERS: Registry[MoePeer] = Registry(
    "MoE peer",
    {
        "vllm_marlin": "benchmarks.peers.vllm_marlin_moe:MarlinPeer",
        "vllm_bf16": "benchmarks.peers.vllm_triton_moe:TritonPeer",
        "humming": "benchmarks.peers.humming_moe:HummingPeer",
        "triton_kernels": "benchmarks.peers.triton_kernels_moe:TritonKernelsPeer",
    },
)


def takes_bf16(config: MoeConfig) -> Answer:
    """`can_implement` of peers timed with bfloat16, and SwiGLU or GPT-OSS's activation."""
    if config.dtype != torch.bfloat16:
        return False, f"timed with bfloat16 only, not {config.dtype}"
    if config.activation not in (SWIGLU, GPT_OSS):
        return False, "has SwiGLU and GPT-OSS's activation only"
    return True, "bfloat16 activations"


def vllm_activation(activation: GatedActivation) -> Any:
    """vLLM's name of an activation that `takes_bf16` allows."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation.SWIGLUOAI if activation == GPT_OSS else MoEActivation.SILU


def one_scale_per_expert(global_scale: torch.Tensor) -> torch.Tensor:
    """float32 `[E]` of `[E, P]`; ValueError if an expert's parts differ."""
    if not torch.equal(global_scale, global_scale[:, :1].expand_as(global_scale)):
        raise ValueError("global_scale: expected equal scales of gate and up")
    return global_scale[:, 0].contiguous()
