"""The two attention functions that halfbyte registers with transformers.

- `halfbyte_engine`: the engine passes a `PagedBatch` in the model's keyword arguments, with a flat
  ragged `[1, tokens]` batch. It has no mask function, so no mask is built.
- `halfbyte_generate`: `halfbyte.Cache.update` returns a handle in place of K and of V. Its mask
  function passes the 2-D padding mask through. Given plain tensors (no halfbyte cache) it computes
  ordinary attention, so that a model that uses it works without the cache too.

The names contain neither "flash" nor "/", which transformers treats specially.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from halfbyte.attention import attend
from halfbyte.models.attention_op import engine_attention_op, store_and_attend
from halfbyte.models.batch import PagedBatch

ENGINE = "halfbyte_engine"
"""Name of the engine's attention function in transformers' registry."""
GENERATE = "halfbyte_generate"
"""Name of the attention function for `generate()` in transformers' registry."""
BATCH_ARGUMENT = "halfbyte_batch"
"""Keyword argument that passes the `PagedBatch` through the model's forward."""


class PackedCache(Protocol):
    """Interface of caches that return `KVHandle`: `halfbyte.Cache` and `KVRecorder`."""

    def attend(
        self,
        handle: "KVHandle",
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store a handle's chunk, then attend to all cached tokens of its layer.

        Args:
            query: `[batch, heads, queries, D]`.
            mask: see `generate_attention`.
            options: scale, sliding window, sinks and soft-cap.

        Returns:
            `[batch, queries, heads, Dv]`.
        """
        ...


@dataclass(frozen=True)
class KVHandle:
    """Returned by `Cache.update` for K and for V: the chunk's tensors and their cache."""

    cache: PackedCache
    layer: int
    key: torch.Tensor
    value: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        """Raise: another attention implementation uses the handle as a tensor."""
        raise AttributeError(
            f"{name}: only halfbyte's attention can read a halfbyte.Cache: make the cache for this "
            f"model object, or call its set_attn_implementation({GENERATE!r})"
        )


class _ForInference(torch.autograd.Function):
    """Backward raises; zero gradients of Q, K and V would be silently wrong."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return result.clone()  # hooks cannot modify a view in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("halfbyte.Cache is for inference and has no derivative")


def register() -> None:
    """Register both functions. A second call has no effect."""
    AttentionInterface.register(ENGINE, engine_attention)
    AttentionInterface.register(GENERATE, generate_attention)
    AttentionMaskInterface.register(GENERATE, padding_mask)


def engine_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a flat ragged batch over the pool.

    Args:
        query, key, value: `[1, heads, tokens, D]`.
        attention_mask: unused (None).

    Returns:
        `[1, tokens, heads, Dv]` and no weights.
    """
    inputs = [x[0].transpose(0, 1) for x in (query, key, value)]
    scale = _scale(query, scaling)
    if torch.compiler.is_compiling():  # the layer has no batch then
        return engine_attention_op(*inputs, scale, sliding_window, s_aux, softcap)[None], None
    batch: PagedBatch | None = kwargs.get(BATCH_ARGUMENT)
    if batch is None:
        raise RuntimeError(
            f"{type(module).__name__}: no {BATCH_ARGUMENT} reached the attention function; "
            f"{ENGINE!r} works only inside halfbyte.LLM (is a stream of an LLM with this model "
            "unfinished?); to call the model yourself, make a halfbyte.Cache"
        )
    out = store_and_attend(
        module,
        batch,
        *inputs,
        scale=scale,
        sliding_window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
    )
    return out[None], None


def generate_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: "torch.Tensor | KVHandle",
    value: "torch.Tensor | KVHandle",
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a padded batch, over a `halfbyte.Cache` if one is in use.

    Args:
        query: `[batch, heads, queries, D]`.
        key, value: handles of the cache, or `[batch, kv_heads, keys, D]`.
        attention_mask: `[batch, keys]`, nonzero for tokens, zero for padding; None for no padding.

    Returns:
        `[batch, queries, heads, Dv]` and no weights; rows of padding are 0.
    """
    options: dict[str, Any] = {
        "scale": _scale(query, scaling),
        "sliding_window": sliding_window,
        "sinks": s_aux,
        "softcap": softcap,
    }
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions: halfbyte's attention does not return attention weights; use "
            "transformers' own cache and attn_implementation='eager'"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask: halfbyte needs a 2-D [batch, tokens] mask of padding, "
            f"got {tuple(attention_mask.shape)}"
        )
    if isinstance(key, KVHandle):
        result = key.cache.attend(key, query, attention_mask, options)
        inputs = (query, key.key, key.value)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            result = _ForInference.apply(result, *inputs)
        return result, None
    assert isinstance(value, torch.Tensor)
    return dense_attention(query, key, value, attention_mask, options), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The 2-D mask cut to the current keys; None if nothing is masked."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return None if bool(mask.all()) else mask


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of a padded batch to unquantized K and V; arguments as `PackedCache.attend`."""
    batch, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    out = query.new_zeros((batch, num_queries, heads, value.shape[-1]))
    columns = torch.arange(num_keys, device=query.device)
    query_columns = columns[num_keys - num_queries :]
    for row in range(batch):
        keep = columns if mask is None else columns[mask[row, :num_keys]]
        attend(
            query[row].transpose(0, 1),
            key[row].transpose(0, 1)[keep].float(),
            value[row].transpose(0, 1)[keep].float(),
            query_positions=query_columns,
            key_positions=keep,
            out=out[row],
            **options,
        )
    return out


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling
