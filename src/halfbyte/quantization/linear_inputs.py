"""Watches the inputs of linear layers while a model runs."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Key = TypeVar("Key", bound=Hashable)


class LinearInputs(TorchFunctionMode, ABC, Generic[Key]):
    """A context in which the input of each watched weight is recorded.

    Weights are identified by their addresses, which works for `nn.Linear` and for experts in one
    tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key_at: dict[int, Key] = {}

    def watch(self, weight: torch.Tensor, key: Key) -> None:
        """Record the inputs of a matrix `[N, K]` under a key."""
        self._key_at[weight.data_ptr()] = key

    @abstractmethod
    def record(self, key: Key, x: torch.Tensor) -> None:
        """Take an input `[..., K]` that is not empty."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for every PyTorch function; `F.linear` is recorded."""
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            key = self._key_at.get(weight.data_ptr())
            if key is not None and args[0].numel():
                self.record(key, args[0])
        return func(*args, **(kwargs or {}))
