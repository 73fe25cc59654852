"""`NvFp4Experts`: the experts of a mixture with NVFP4 weights, as one module.

Stands in for transformers' modules of fused experts, whose `forward` it has. Life of a layer:
created empty, filled (`load_projection`, `load_state_dict`), processed by a kernel
(`process_weights_after_loading`, at the latest in the first call), called. The state dict has the
names of checkpoints, one set per expert and projection, and is the same before and after
processing. Moving a layer restores the weights; the next call selects a kernel again."""

from threading import RLock

import torch

from halfbyte.checkpoints.dialects.base import Dialect
from halfbyte.moe.as_loaded import to_tensors
from halfbyte.moe.base import MoeConfig, MoeKernel
from halfbyte.moe.experts import SWIGLU, GatedActivation, PackedExperts
from halfbyte.moe.interface import check_arguments
from halfbyte.moe.registry import init_moe_kernel
from halfbyte.moe.stored_experts import StoredExperts

_PROCESSING = RLock()
"""One lock for all layers: a lock in a layer would prevent `copy.deepcopy`."""


class NvFp4Experts(StoredExperts):
    """`sum over j of topk_weights[:, j] * expert[topk_ids[:, j]](x)`, weights in NVFP4, W4A16.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of 16.
        intermediate_size: I, a multiple of 16.
        bias: whether projections have biases.
        activation: between them; gate above up.
        dtype: of hidden states, biases and result: float16, bfloat16 or float32; by default
            PyTorch's.
        device: of the tensors; may be "meta".
        backend: a name of `MOE_BACKENDS`, or None for the first that supports the layer.
        batch_invariant: a token's result is bitwise the same for any batch.
        dialect: of the state dict.

    Raises:
        ValueError: an invalid size, dtype or activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        activation: GatedActivation = SWIGLU,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        dialect: Dialect = "modelopt",
    ) -> None:
        super().__init__(
            num_experts, hidden_size, intermediate_size, bias, activation, dtype, device, dialect
        )
        self.backend, self.batch_invariant = backend, batch_invariant
        self.kernel: MoeKernel | None = None

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
            ValueError: an argument that does not fit.
            CheckpointError: a tensor was never loaded, or a scale is not finite.
            NoImplementationError: no backend, or not the one asked for, can do the work.
        """
        if self.kernel is None:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{self.layer_name or 'NvFp4Experts'}: call process_weights_after_loading() "
                    "before torch.compile"
                )
            self.process_weights_after_loading()
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
            CheckpointError: a tensor was never loaded, or holds a scale that is not finite; one
                line that names expert and projection.
            NoImplementationError: no backend, or not the one asked for, can do the work.
        """
        with _PROCESSING:  # first calls may come from several threads
            if self.kernel is not None:
                return
            self.check_tensors()
            self.derive_scales()
            experts = self.packed_experts()
            config = MoeConfig.of(experts, self.dtype, self.batch_invariant)
            kernel = init_moe_kernel(config, self.backend)
            tensors = kernel.prepare(experts)
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
        for name, tensor in to_tensors(experts).items():
            self._set(name, tensor)

    def packed_experts(self) -> PackedExperts:
        """The experts as loaded, also if the weights were processed."""
        if self.kernel is None:
            return super().packed_experts()
        return self.kernel.restore({name: p.detach() for name, p in self.named_parameters()})

    def extra_repr(self) -> str:
        """For `print(model)`."""
        backend = self.kernel.name if self.kernel else self.backend or "not chosen yet"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, bias={self.has_bias}, W4A16, "
            f"dtype={self.dtype}, backend={backend}"
        )
