"""`halfbyte.Cache`: the paged cache behind transformers' `generate()`.

    model = halfbyte.load_model(path)
    cache = halfbyte.Cache(model, "nvfp4")
    model.generate(**inputs, past_key_values=cache)

transformers works with columns: all rows of a batch have the same number, padding included. The
pool stores tokens: row b's sequence is its columns with mask 1, in order. `update` does not get the
mask, so it returns a handle; the attention function gets it, writes the chunk and attends to the
cache. Rows share pages until they differ (beam search).
"""

import copy
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from halfbyte.attention import check_attention_backend
from halfbyte.kvcache import KVRecipe, KVScales, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.models.architectures import LayerDTypes
from halfbyte.models.attention_functions import GENERATE, KVHandle, register
from halfbyte.models.batch import KVQuantization, PagedBatch
from halfbyte.models.kv_setup import KVSetup

_INITIAL_PAGES = 64


class Cache(transformers.Cache):
    """A KV cache for `generate()`, packed and paged; it grows as needed.

    Args:
        model: a transformers model of a supported architecture. Its attention implementation is
            set to halfbyte's, which also works without this cache.
        kv_cache_dtype: format, or formats per layer (see `LayerDTypes`).
        v_cache_dtype: format or formats of V, where they differ from K's.
        block_size: tokens per page.
        kv_scales: global scales, or a file of them; by default see `find_kv_scales`, else one
            calibration pass.
        kv_recipe: transforms of K and V before quantization, see `KVRecipe`; by default `balanced`,
            or `plain` where the scales or the backend support only untransformed K.
        attention_backend: name of an attention backend, or None to choose.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        ValueError: an unknown format, or one that cannot store the model's head size.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv_cache_dtype: LayerDTypes = "nvfp4",
        *,
        v_cache_dtype: LayerDTypes | None = None,
        block_size: int = 16,
        kv_scales: KVScales | str | Path | None = None,
        kv_recipe: str | KVRecipe | None = None,
        attention_backend: str | None = None,
    ) -> None:
        # Duck-typed: compiled models and adapters forward these attributes.
        if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
            raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
        check_attention_backend(attention_backend, model.device)
        # Sliding-window layers keep every page, so that any crop and beam search work.
        specs, scales, recipe = KVSetup.of(
            model,
            kv_cache_dtype,
            block_size,
            v_cache_dtype=v_cache_dtype,
            keep_all=True,
            kv_scales=kv_scales,
            kv_recipe=kv_recipe,
            attention_backend=attention_backend,
        )
        pool = PagedKVPool(plan_kv_cache(specs), _INITIAL_PAGES, model.device)
        recent = RecentTokens.of(pool.plan, recipe, model.dtype, model.device)
        self.tables = SequenceTables(pool, can_grow=True, recent=recent)
        self.kv_scales, self.recipe = scales, recipe
        self._quantization = KVQuantization.of(pool, scales, recipe)
        self._backend = attention_backend
        self._rows: list[int] = []
        self._next_row = 0
        # Columns that are tokens (not padding), per row; on the CPU, like the tables.
        self._valid = torch.zeros((0, 0), dtype=torch.bool, device="cpu")
        self._step: PagedBatch | None = None
        self._step_tokens: torch.Tensor | None = None
        register()
        model.set_attn_implementation(GENERATE)
        self._paged_layers = [_PagedLayer(self, layer) for layer in range(len(specs))]
        super().__init__(layers=list(self._paged_layers))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(x, memo) for k, x in self.__dict__.items()})
        for layer in copied._paged_layers:
            layer.belong_to(copied)
        return copied

    @property
    def pool(self) -> PagedKVPool:
        """The pages."""
        return self.tables.pool

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all layers."""
        return self.pool.plan.bytes_per_token

    def attend(
        self,
        handle: KVHandle,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Write the chunk of `handle`, then attend to the whole cache.

        Args:
            handle: what `update` returned for this layer.
            query: `[batch, heads, queries, D]`, queries as many as the chunk's columns.
            mask: bool `[batch, columns]`, or None for no padding.
            options: `scale`, `sliding_window`, `sinks`, `softcap` of `paged_attention`.

        Returns:
            `[batch, queries, heads, Dv]`; 0 where the query is padding.
        """
        if self._paged_layers[handle.layer].num_columns > self._valid.shape[1]:
            self._begin_step(query.shape[0], query.shape[2], mask)
        assert self._step is not None
        assert self._step_tokens is not None

        def flat(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).flatten(0, 1)[self._step_tokens]

        result = self._step.store_and_attend(
            handle.layer, flat(query), flat(handle.key), flat(handle.value), **options
        )
        batch, heads, queries, _ = query.shape
        out = result.new_zeros((batch * queries, heads, result.shape[-1]))
        out[self._step_tokens] = result
        return out.unflatten(0, (batch, queries))

    def crop(self, tokens_to_remove: int, *args: Any, **kwargs: Any) -> None:
        """Drop columns from the end: -n drops n columns, a positive number is the length kept."""
        self._undo_unfinished_step()
        columns = self._valid.shape[1]
        keep = columns + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if keep >= columns:
            return
        self._valid = self._valid[:, : max(0, keep)]
        for row, length in zip(self._rows, self._valid.sum(1).tolist(), strict=True):
            self.tables.crop(row, length)
        self._sync_layers()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by a copy of row `beam_idx[i]`."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows (indices, or a mask over the rows)."""
        indices = torch.as_tensor(indices, device="cpu")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies adjacent."""
        self._select_rows([row for row in range(len(self._rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Remove all tokens; scales and pages stay allocated."""
        for row in self._rows:
            self.tables.free(row)
        self._rows = []
        self._valid = torch.zeros((0, 0), dtype=torch.bool, device="cpu")
        self._step = self._step_tokens = None
        self._sync_layers()

    @property
    def num_columns(self) -> int:
        """Columns stored by every layer, padding included, an unfinished step excluded."""
        return self._paged_layers[-1].num_columns  # layers run in order

    def _undo_unfinished_step(self) -> None:
        """Drop the columns of a forward pass that failed before it reached every layer."""
        columns = self.num_columns
        if all(layer.num_columns == columns for layer in self._paged_layers):
            return
        if not columns:
            self.reset()
            return
        self._valid = self._valid[:, :columns]
        for row, length in zip(self._rows, self._valid.sum(1).tolist(), strict=True):
            self.tables.crop(row, length)
        self._sync_layers()

    def _sync_layers(self) -> None:
        for layer in self._paged_layers:
            layer.num_columns = self._valid.shape[1]

    def _begin_step(self, batch: int, queries: int, mask: torch.Tensor | None) -> None:
        """Allocate slots for the new columns' tokens, in the first layer of a forward pass."""
        columns = self._valid.shape[1]
        if not self._rows:
            self._rows = self._new_rows(batch)
            self._valid = torch.zeros((batch, 0), dtype=torch.bool, device="cpu")
        if batch != len(self._rows):
            raise ValueError(f"batch: the cache holds {len(self._rows)} rows, got {batch}")
        if mask is None:
            valid = torch.ones((batch, columns + queries), dtype=torch.bool, device="cpu")
        else:
            valid = mask.cpu()
        if valid.shape[1] != columns + queries or not torch.equal(valid[:, :columns], self._valid):
            raise ValueError(
                f"attention_mask: expected {columns + queries} columns, of which the first "
                f"{columns} as before; got {tuple(valid.shape)}"
            )
        counts = valid[:, columns:].sum(1).tolist()
        chunks = list(zip(self._rows, counts, strict=True))
        for row, count in chunks:
            self.tables.append(row, count)
        self._valid = valid
        self._step_tokens = valid[:, columns:].flatten().nonzero().flatten().to(self.pool.device)
        self._step = PagedBatch.of(self.tables, self._quantization, chunks, self._backend)

    def _new_rows(self, count: int) -> list[int]:
        rows = list(range(self._next_row, self._next_row + count))
        self._next_row += count
        for row in rows:
            self.tables.add(row)
        return rows

    def _select_rows(self, indices: Sequence[int]) -> None:
        self._undo_unfinished_step()
        rows = list(range(self._next_row, self._next_row + len(indices)))
        self._next_row += len(rows)
        for row, source in zip(rows, indices, strict=True):
            self.tables.fork(self._rows[source], row)
        for row in self._rows:
            self.tables.free(row)
        self._rows = rows
        self._valid = self._valid[torch.tensor(indices, dtype=torch.int64, device="cpu")]


class _PagedLayer(CacheLayerMixin):
    """One layer's view of the cache; holds no state but the number of columns."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Cache, layer: int) -> None:
        super().__init__()
        # Weak, so that `del cache` frees the pool without the garbage collector.
        self._owner = weakref.ref(cache)
        self._layer = layer
        self.num_columns = 0
        self.is_initialized = True

    @property
    def _cache(self) -> Cache:
        cache = self._owner()
        if cache is None:
            raise ReferenceError("halfbyte.Cache: was deleted; keep a reference to it")
        return cache

    def belong_to(self, cache: Cache) -> None:
        """Attach to a copy of the cache."""
        self._owner = weakref.ref(cache)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: pages are allocated as tokens come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Handles for K and V, for halfbyte's attention function only."""
        if self.num_columns > self._cache.num_columns:  # an earlier forward pass failed
            self._cache._undo_unfinished_step()
        self.num_columns += key_states.shape[2]
        handle = KVHandle(self._cache, self._layer, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of columns that the mask must cover, the first of them)."""
        return self._cache.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns so far, padding included."""
        return self._cache.num_columns

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of `get_max_length`."""
        return -1
