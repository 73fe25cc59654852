"""Base of modules that hold all experts of an MoE layer.

A layer replaces transformers' fused experts and has the signature of their `forward`. It is
created empty, loaded, processed by a kernel (`process_weights_after_loading`, at the latest in the
first call) and called. Its state dict has the files' tensors, before and after processing. Moving a
layer restores the weights; the next call selects a kernel again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import RLock
from typing import ClassVar

import torch
from torch import nn

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.linear.base import check_dtype
from halfbyte.linear.dialect_tensors import full_name
from halfbyte.linear.quantized_module import QuantizedModule
from halfbyte.moe.base import MoeConfig, MoeKernel
from halfbyte.moe.experts import GatedActivation, PackedExperts, WeightFormat
from halfbyte.moe.interface import check_arguments
from halfbyte.moe.registry import init_moe_kernel

_PROCESSING = RLock()
"""One lock for all layers: a lock in a layer would prevent `copy.deepcopy`."""


class ExpertsLayer(QuantizedModule, ABC):
    """`sum over j of topk_weights[:, j] * expert[topk_ids[:, j]](x)`, W4A16.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of the format's block size.
        intermediate_size: I, a multiple of the format's block size.
        bias: whether projections have biases.
        activation: applied between the gate_up and down projections.
        dtype: of hidden states, biases and result: float16, bfloat16 or float32; by default
            PyTorch's.
        backend: a name of `MOE_BACKENDS`, or None for the first that supports the layer.
        batch_invariant: a token's result is bitwise the same for any batch.

    Raises:
        ValueError: an invalid size or dtype.
    """

    weight_format: ClassVar[WeightFormat]

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: GatedActivation,
        dtype: torch.dtype | None,
        backend: str | None,
        batch_invariant: bool,
    ) -> None:
        super().__init__()
        self.dtype = check_dtype(torch.get_default_dtype() if dtype is None else dtype)
        # Checks the sizes.
        MoeConfig(num_experts, hidden_size, intermediate_size, self.dtype, self.weight_format)
        self.num_experts, self.has_bias, self.activation = num_experts, bias, activation
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.backend, self.batch_invariant = backend, batch_invariant
        self.layer_name = ""
        """Name in error messages."""
        self.kernel: MoeKernel | None = None

    @abstractmethod
    def _make_empty(self, device: torch.device | str | None) -> None:
        """Replace all parameters by empty ones, as before loading."""

    @abstractmethod
    def check_tensors(self) -> None:
        """Raise CheckpointError unless every tensor was loaded; scales and biases are finite."""

    @abstractmethod
    def _loaded_experts(self) -> PackedExperts:
        """The experts as loaded; only before processing."""

    @abstractmethod
    def _keep(self, experts: PackedExperts) -> None:
        """The inverse of `_loaded_experts`: make the experts the layer's parameters."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden_states: `[tokens, H]` of the layer's dtype.
            top_k_index: int32 or int64 `[tokens, top_k]`; `num_experts` means no expert.
            top_k_weights: `[tokens, top_k]`, used as given.

        Returns:
            `[tokens, H]`.

        Raises:
            ValueError: an argument has a wrong shape, dtype or device.
            CheckpointError: a tensor was never loaded, or a scale is not finite.
            NoImplementationError: no backend, or not the requested one, can do the work.
        """
        if self.kernel is None:
            self.process_in_first_call()
        assert self.kernel is not None
        check_arguments(hidden_states, self.hidden_size, self.device, top_k_index, top_k_weights)
        if hidden_states.dtype != self.dtype:
            raise ValueError(f"hidden: expected {self.dtype}, got {hidden_states.dtype}")
        tensors = {name: p for name, p in self._parameters.items() if p is not None}
        return self.kernel.apply(tensors, hidden_states, top_k_index, top_k_weights)

    @torch.inference_mode(False)  # inference tensors must not remain in the layer
    def process_weights_after_loading(self) -> None:
        """Select a kernel and let it convert the weights; does nothing if already processed.

        Raises:
            CheckpointError: a tensor was never loaded, or holds a scale that is not finite, or the
                backend cannot represent the weights exactly; one line that names it.
            NoImplementationError: no backend, or not the requested one, can do the work.
        """
        with _PROCESSING:  # first calls may come from several threads
            if self.kernel is not None:
                return
            self.check_tensors()
            experts = self._loaded_experts()
            config = MoeConfig.of(experts, self.dtype, self.batch_invariant)
            kernel = init_moe_kernel(config, self.backend)
            try:
                tensors = kernel.prepare(experts)
            except ValueError as error:
                raise CheckpointError(f"{self.layer_name}: {error}") from None
            self._parameters.clear()
            for name, tensor in tensors.items():
                self._set(name, tensor)
            self.kernel = kernel

    @torch.inference_mode(False)  # inference tensors must not remain in the layer
    def unprocess_weights(self) -> None:
        """Restore the weights as loaded; does nothing if not processed."""
        if self.kernel is None:
            return
        experts, self.kernel = self.packed_experts(), None
        self._parameters.clear()
        self._keep(experts)

    def packed_experts(self) -> PackedExperts:
        """The experts as loaded, also if the weights were processed."""
        if self.kernel is None:
            return self._loaded_experts()
        return self.kernel.restore({name: p.detach() for name, p in self.named_parameters()})

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.parameters()).device

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _check_biases(self) -> None:
        """Raise CheckpointError for a bias that is not finite."""
        for name, tensor in self._parameters.items():
            if tensor is None or not name.endswith("_bias"):
                continue
            bad = (~tensor.data.isfinite()).sum(1)
            if bool(bad.any()):
                expert = int(bad.nonzero()[0])
                raise CheckpointError(
                    f"{full_name(self.layer_name, name)}: expert {expert}: expected finite biases, "
                    f"found {int(bad[expert])} NaN or infinite of {tensor.shape[1]}"
                )

    def _biases(self) -> Sequence[torch.Tensor | None]:
        return [p for name, p in self._parameters.items() if name.endswith("_bias")]

    def _forget(self, device: torch.device) -> None:
        self._make_empty(device)

    def extra_repr(self) -> str:
        """Arguments and backend, shown by `print(model)`."""
        backend = self.kernel.name if self.kernel else self.backend or "not chosen yet"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, bias={self.has_bias}, W4A16, "
            f"dtype={self.dtype}, backend={backend}"
        )
