"""Base of modules with packed weights: moving them, and processing them in the first call."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from halfbyte.linear.base import check_dtype


class QuantizedModule(nn.Module):
    """Packed weights that a kernel may repack, and biases in the module's dtype."""

    dtype: torch.dtype
    """Dtype of activations and biases."""
    layer_name: str
    """Name in error messages."""
    kernel: Any
    """The kernel that processed the weights; None before."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors are."""

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Select a kernel and let it convert the weights; does nothing if already processed."""

    @abstractmethod
    def unprocess_weights(self) -> None:
        """Restore the weights as loaded; does nothing if not processed."""

    @abstractmethod
    def _biases(self) -> Sequence[torch.Tensor | None]:
        """Parameters that follow a change of dtype."""

    @abstractmethod
    def _forget(self, device: torch.device) -> None:
        """Replace all parameters by empty ones on a device, as before loading."""

    def process_in_first_call(self) -> None:
        """Process the weights, unless the call is traced: RuntimeError then."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.layer_name or type(self).__name__}: call process_weights_after_loading() "
                "before torch.compile"
            )
        self.process_weights_after_loading()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Implements `to`, `cuda` and `half`: codes and scales change device, not dtype."""
        probe = torch.zeros(0, dtype=self.dtype, device=self.device)
        after = fn(probe)
        check_dtype(after.dtype)
        if (after.device, after.dtype) != (probe.device, probe.dtype):
            self.unprocess_weights()
        biases = {id(tensor) for tensor in self._biases()}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            changes = result.dtype != tensor.dtype and id(tensor) not in biases
            return tensor.to(result.device) if changes else result

        super()._apply(keep_dtype, recurse)
        self.dtype = after.dtype
        if probe.is_meta and not after.is_meta:  # after to_empty() nothing is loaded
            self._forget(after.device)
        return self
