"""The two attention functions that halfbyte registers with transformers.

- `halfbyte_engine`: the engine hands a `PagedBatch` through the model's keyword arguments, with a
  flat ragged `[1, tokens]` batch. No mask function is registered for it, so no mask is built.
- `halfbyte_generate`: `halfbyte.Cache.update` returns a handle in place of K and of V. Its mask
  function passes the 2-D padding mask on. Given plain tensors (no halfbyte cache) it computes
  ordinary attention, so that a model switched to it keeps working as before.

The names contain neither "flash" nor "/", on which transformers acts.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from halfbyte.attention import attend
from halfbyte.models.architectures import sliding_windows
from halfbyte.models.batch import PagedBatch

ENGINE = "halfbyte_engine"
GENERATE = "halfbyte_generate"
BATCH_ARGUMENT = "halfbyte_batch"


class PackedCache(Protocol):
    """Who gives out handles: `halfbyte.Cache`, and what calibrates for one."""

    def attend(
        self,
        handle: "KVHandle",
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store a handle's chunk and attend to all that the cache has of its layer.

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
    """What `Cache.update` returns for K and for V: the chunk's tensors and their cache."""

    cache: PackedCache
    layer: int
    key: torch.Tensor
    value: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        """What another attention would ask of a tensor."""
        raise AttributeError(
            f"{name}: only halfbyte's attention reads a halfbyte.Cache: make one for this very "
            f"model, or call its set_attn_implementation({GENERATE!r})"
        )


class _ForInference(torch.autograd.Function):
    """Result of a cache, whose way back to Q, K and V is an error instead of a zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return result.clone()  # of a view, hooks could change nothing in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("halfbyte.Cache is for inference and has no derivative")


def register() -> None:
    """Register both functions; doing it again changes nothing."""
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
    """Attention of a flat ragged batch through the pool.

    Args:
        query, key, value: `[1, heads, tokens, D]`.
        attention_mask: unused; there is none.

    Returns:
        `[1, tokens, heads, Dv]` and no weights.
    """
    batch: PagedBatch | None = kwargs.get(BATCH_ARGUMENT)
    if batch is None:
        raise RuntimeError(
            f"{type(module).__name__}: no {BATCH_ARGUMENT} reached the attention function; "
            f"{ENGINE!r} is for halfbyte.LLM, which has this model while a stream of its is open; "
            "at other times, make a halfbyte.Cache"
        )
    layer = _layer_index(module)
    _check_window(module, layer, sliding_window)
    out = batch.store_and_attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=_scale(query, scaling),
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
    """Attention of a padded batch, through `halfbyte.Cache` where it is in use.

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
            "output_attentions: halfbyte's attention has no weights to give; for those use "
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
    """The 2-D mask over the keys at hand; None where it hides nothing."""
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
    """Attention of a padded batch to K and V as they are; arguments as of `PackedCache.attend`."""
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


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _check_window(module: nn.Module, layer: int, sliding_window: int | None) -> None:
    """The pool frees pages by the window of the config: it must be the window that is used."""
    expected = sliding_windows(module.config)[layer]
    if expected is not None and expected != sliding_window:
        raise RuntimeError(
            f"layer {layer} attends with a window of {sliding_window}, its config says {expected}"
        )
