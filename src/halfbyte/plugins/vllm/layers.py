"""Norms, SwiGLU and rotary embedding of vLLM's models by `halfbyte.elementwise`.

Registered as vLLM's out-of-tree layers, which take the place of classes of the same names. Layers
of a run that does not use them do what vLLM's do.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from halfbyte.after_import import after_import
from halfbyte.elementwise import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from halfbyte.elementwise.ops import KERNEL_DTYPES
from halfbyte.kernels.runtime.inductor import can_overlap
from halfbyte.plugins.vllm.registry import uses_halfbyte

_LAYERS = "vllm.model_executor.layers."
_ROTARY = "rotary_embedding"
"""Package with the classes for rotary embeddings."""
_MIN_NORM = 1024
"""Min size of a norm: norms of single heads are many small rows, which Inductor joins with the
rotary embedding after them."""


def install() -> None:
    """Register the layers once vLLM imports its own."""
    after_import(f"{_LAYERS}layernorm", lambda module: _register(module.RMSNorm, _Norm))
    after_import(f"{_LAYERS}activation", lambda module: _register(module.SiluAndMul, _Gate))
    after_import(f"{_LAYERS}{_ROTARY}", _register_rotary)


def wants_layers(vllm_config: Any) -> bool:
    """Whether a run's layers use the kernels: on Hopper, with halfbyte's attention, on one GPU.

    With several GPUs vLLM fuses norms with its all-reduce, which it finds by their operators.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None or not uses_halfbyte(vllm_config):
        return False
    alone = vllm_config.parallel_config.tensor_parallel_size == 1
    return alone and can_overlap(capability.to_int()) and not _batch_invariant()


def _batch_invariant() -> bool:
    import vllm.envs as envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _register(layer: Any, mixin: type) -> None:
    """Register a subclass of a layer whose `forward_native` is a mixin's."""

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        layer.__init__(self, *args, **kwargs)
        self.uses_kernels = wants_layers(get_current_vllm_config())

    own = type(f"Halfbyte{layer.__name__}", (mixin, layer), {"__init__": begin})
    layer.register_oot(own, name=layer.__name__)


def _register_rotary(package: ModuleType) -> None:
    base = package.RotaryEmbedding
    _register(base, _Rotary)
    for layer in _subclasses(base):
        if layer.forward_native is base.forward_native:
            _register(layer, _Rotary)


def _subclasses(layer: Any) -> Iterator[Any]:
    for found in layer.__subclasses__():
        if found.__module__.startswith(_LAYERS):
            yield found
            yield from _subclasses(found)


class _Norm:
    """`RMSNorm` with a weight for every channel."""

    def forward_native(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        has_weight = self.pass_weight if residual is None else self.pass_weight_add
        plain = has_weight and self.variance_size_override is None and x.shape[-1] >= _MIN_NORM
        if not (self.uses_kernels and plain and _suits(x, self.weight)):
            return super().forward_native(x, residual)  # type: ignore[misc]
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class _Gate:
    """`SiluAndMul`."""

    def forward_native(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.uses_kernels and _suits(x) and x.shape[-1] % 16 == 0:
            result: torch.Tensor = silu_and_mul(x)
            return result
        return super().forward_native(x)  # type: ignore[misc]


class _Rotary:
    """`RotaryEmbedding` and others that differ in their angles only."""

    def forward_native(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        table, size = self.cos_sin_cache, self.head_size
        fits = size % 8 == 0 and table.shape[1] % 8 == 0 and table.dtype == query.dtype
        if not (self.uses_kernels and fits and key is not None and positions.dim() == 1):
            return super().forward_native(positions, query, key)  # type: ignore[misc]
        if query.dim() != 2 or not _suits(query, key):
            return super().forward_native(positions, query, key)  # type: ignore[misc]
        return rotary_embedding(positions, query, key, table, size, not self.is_neox_style)


def _suits(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel takes tensors of these dtypes."""
    return x.dtype in KERNEL_DTYPES and all(other.dtype == x.dtype for other in others)
