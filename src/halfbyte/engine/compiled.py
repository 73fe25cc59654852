"""Decoder layers through `torch.compile`, which fuses the work between products and attention.

The model code of transformers runs norms, rotary embedding, activation and residuals as some 30
small kernels per layer; Inductor makes a handful of them. Matrix products and attention stay
operators that it cannot see into (`linear/ops.py`, `models/attention_op.py`).

A layer is compiled as a whole, without graph breaks, or not at all. Its weights are inputs of the
graph, so all layers of a kind share one; a second one is for batches of 1, because PyTorch
specializes a dimension of size 1. Other batch sizes need no compilation.

Inductor rounds less than PyTorch's kernels: intermediate values stay float32. So compiled steps do
not give the bits of eager ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from halfbyte.dispatch import compute_capability_of
from halfbyte.kernels.runtime.inductor import OVERLAP, can_overlap
from halfbyte.models import BATCH_ARGUMENT, PagedBatch
from halfbyte.models.attention_op import running

_numbers = count()


class CompiledLayers:
    """Replaces the calls of a model's decoder layers, within `in_use`.

    Args:
        model: must have the engine's attention attached during a call.
        backend: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        self._model = model
        # Dynamo limits the compilations of a function; each model has a function of its own.
        code = _run_layer.__code__.replace(co_name=f"run_layer_{next(_numbers)}")
        function = FunctionType(code, _run_layer.__globals__)
        options = _inductor_options(model) if backend == "inductor" else None
        self._run = torch.compile(function, backend=backend, fullgraph=True, options=options)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the layers run compiled; the first call of a kind compiles.

        Raises:
            ValueError: the model has no list of layers with one attention each.
        """
        before = [(layer, layer._compiled_call_impl) for layer, _ in self._layers]
        try:
            for layer, attention in self._layers:
                # What `nn.Module.compile` sets as well.
                layer._compiled_call_impl = partial(self._call, layer, attention)
            yield
        finally:
            for layer, call in before:
                layer._compiled_call_impl = call

    @cached_property
    def _layers(self) -> list[tuple[nn.Module, nn.Module]]:
        return decoder_layers(self._model)

    def _call(self, layer: nn.Module, attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch: PagedBatch = kwargs.pop(BATCH_ARGUMENT)
        tokens = batch.positions.numel()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == tokens > 1:
                torch._dynamo.mark_dynamic(leaf, 1)
        with running(attention, batch):
            return self._run(layer, args, kwargs)


def decoder_layers(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The layers of a transformers model, each with its attention.

    Raises:
        ValueError: the model has no list of layers with one attention each.
    """
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            found = [(layer, _attention_of(layer)) for layer in layers]
            if found and all(attention is not None for _, attention in found):
                return [(layer, attention) for layer, attention in found if attention is not None]
    raise ValueError(f"{type(model).__name__}: found no list of layers with one attention each")


def _attention_of(layer: nn.Module) -> nn.Module | None:
    inner = [x for x in layer.modules() if x is not layer and hasattr(x, "layer_idx")]
    return inner[0] if len(inner) == 1 else None


def _inductor_options(model: nn.Module) -> dict[str, Any] | None:
    """For dense models on Hopper: start a kernel before the previous one has ended, as ours do.
    With experts it was not timed in this engine."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    is_dense = not any(name.endswith(".experts") for name, _ in model.named_modules())
    return {OVERLAP: True} if is_dense and can_overlap(compute_capability_of(device)) else None


def _run_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer._call_impl(*args, **kwargs)
