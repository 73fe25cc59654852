"""The engine's attention as a PyTorch operator, for layers that `torch.compile` compiles.

`halfbyte::engine_attention` stores K and V and attends. The step's `PagedBatch` and the layer's
module cannot be arguments of an operator, and an index of the layer would be a constant, so that
every layer would need a graph of its own: `running` provides batch and module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from halfbyte.kernels.runtime.operators import make_operator
from halfbyte.models.architectures import sliding_windows
from halfbyte.models.batch import PagedBatch

_running: ContextVar[tuple[nn.Module, PagedBatch]] = ContextVar("running")


@contextmanager
def running(module: nn.Module, batch: PagedBatch) -> Iterator[None]:
    """Context in which a compiled layer runs.

    Args:
        module: the layer's attention.
        batch: the step.
    """
    token = _running.set((module, batch))
    try:
        yield
    finally:
        _running.reset(token)


def store_and_attend(
    module: nn.Module,
    batch: PagedBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Store a step's K and V of a layer, and attend; arguments as `PagedBatch.store_and_attend`.

    Raises:
        RuntimeError: the window is not the config's, by which the pool frees pages.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    expected = sliding_windows(module.config)[layer]
    if expected is not None and expected != sliding_window:
        raise RuntimeError(
            f"layer {layer} attends with a window of {sliding_window}, its config says {expected}"
        )
    return batch.store_and_attend(
        layer,
        query,
        key,
        value,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        softcap=softcap,
    )


def _engine_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    module, batch = _running.get()
    out = store_and_attend(
        module,
        batch,
        query,
        key,
        value,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        softcap=softcap,
    )
    return out.contiguous()


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: object
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


engine_attention_op = make_operator("engine_attention", _engine_attention, _fake)
"""`(query, key, value, scale, sliding_window, sinks, softcap)`: `store_and_attend` with the
module and batch of `running`."""
