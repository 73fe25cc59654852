"""The interface of kernels for mixture-of-experts layers.

A kernel object belongs to one layer. `prepare` may repack the layer's tensors once; `apply` gets
the result in every call.

The result for hidden states `x [M, H]`, expert ids and weights `[M, top_k]`:

    out[m] = sum over j of topk_weights[m, j] * expert(topk_ids[m, j], x[m])

in the order of j. Sums of products are float32; where a kernel writes an intermediate (the
activation's result, an expert's result) it rounds it to the dtype of x. An id outside `0 .. E-1`
adds nothing: expert-parallel ranks mark the experts of other ranks so. Weights are used as given:
normalizing them is the router's task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.dispatch import CPU, Answer, compute_capability_of
from halfbyte.linear.base import check_dtype
from halfbyte.moe.experts import BLOCK_SIZES, SWIGLU, GatedActivation, PackedExperts, WeightFormat


@dataclass(frozen=True)
class MoeConfig:
    """Sizes and options of a layer, by which kernels decide whether they support it.

    Raises:
        ValueError: an invalid field; the message gives its name and value.
    """

    num_experts: int
    hidden_size: int
    """H, a multiple of the format's block size."""
    intermediate_size: int
    """I, a multiple of the format's block size."""
    dtype: torch.dtype
    """Dtype of hidden states and result: float16, bfloat16 or float32."""
    weight_format: WeightFormat = "nvfp4"
    has_bias: bool = False
    activation: GatedActivation = SWIGLU
    batch_invariant: bool = False
    """A token's result must be bitwise the same for any batch."""
    device_type: str = "cpu"
    compute_capability: int = CPU
    """The target GPU's, as in `dispatch`, such as 90."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.num_experts < 1:
            raise ValueError(f"num_experts: expected a number >= 1, got {self.num_experts}")
        if self.weight_format not in BLOCK_SIZES:
            raise ValueError(f"weight_format: expected nvfp4 or mxfp4, got {self.weight_format!r}")
        block = BLOCK_SIZES[self.weight_format]
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size < 1 or size % block:
                raise ValueError(
                    f"{name}: expected a positive multiple of {block} for {self.weight_format}, "
                    f"got {size}"
                )

    @classmethod
    def of(
        cls, experts: PackedExperts, dtype: torch.dtype, batch_invariant: bool = False
    ) -> "MoeConfig":
        """The config of a layer's experts.

        Args:
            experts: the layer.
            dtype: of hidden states.
            batch_invariant: a token's result is bitwise the same for any batch.
        """
        return cls(
            num_experts=experts.num_experts,
            hidden_size=experts.hidden_size,
            intermediate_size=experts.intermediate_size,
            dtype=dtype,
            weight_format=experts.gate_up.format,
            has_bias=experts.gate_up.bias is not None,
            activation=experts.activation,
            batch_invariant=batch_invariant,
            device_type=experts.device.type,
            compute_capability=compute_capability_of(experts.device),
        )


class MoeKernel(ABC):
    """Base of MoE kernels; one object per layer."""

    name: ClassVar[str]

    def __init__(self, config: MoeConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a compute capability; None for this machine and its packages."""

    @classmethod
    @abstractmethod
    def can_implement(cls, config: MoeConfig) -> Answer:
        """Whether it supports the layer, including `config.device_type`."""

    @abstractmethod
    def prepare(self, experts: PackedExperts) -> dict[str, torch.Tensor]:
        """The layer's tensors in the kernel's layout, under the kernel's own names; contiguous.

        May return tensors of `experts` themselves.

        Raises:
            ValueError: the kernel cannot represent the weights exactly.
        """

    @abstractmethod
    def apply(
        self,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The layer's result `[M, H]` of the dtype of `hidden`.

        Args:
            tensors: the result of `prepare`.
            hidden: `[M, H]` of `config.dtype`; any strides, M >= 0.
            topk_ids: int32 or int64 `[M, top_k]`, top_k >= 1.
            topk_weights: floating point `[M, top_k]`.
        """

    @abstractmethod
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """The experts that `prepare` was given, bit for bit, except for the dtype of biases.

        Args:
            tensors: the result of `prepare`.
        """


class OperatorKernel(MoeKernel):
    """A kernel that is one operator of torch, which takes the tensors of `prepare` one by one."""

    product: ClassVar[Callable[..., torch.Tensor]]
    """The operator, called by name: (x, topk_ids, topk_weights, the tensors of gate_up and of down,
    the activation's fields, n, batch_invariant) -> `[M, n]`."""
    parts: ClassVar[tuple[str, ...]]
    """Names of these tensors without `gate_up_` and `down_`; None for those that a layer lacks."""

    @property
    def options(self) -> dict[str, int]:
        """Further arguments of the operator."""
        return {}

    def apply(
        self,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """See `MoeKernel.apply`."""
        config, activation = self.config, self.config.activation
        names = [f"{name}_{part}" for name in ("gate_up", "down") for part in self.parts]
        return type(self).product(
            x=hidden,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            **{name: tensors.get(name) for name in names},
            **self.options,
            alpha=activation.alpha,
            limit=activation.limit,
            up_offset=activation.up_offset,
            interleaved=activation.interleaved,
            n=config.hidden_size,
            batch_invariant=config.batch_invariant,
        )
