"""Accuracy of a format per layer: SQNR of K and V, and the error of attention logits.

SQNR weighs all channels of K equally, and is nearly the same in every layer. What counts are the
errors of the logits, `d = scale * q . (K' - K)`, weighted by the attention weights `p`:

    KL(p || weights with K') = Var_p(d) / 2 + O(d^3),    Var_p(d) = sum p d^2 - (sum p d)^2

So `logit_error` is the root mean of Var_p(d) over queries and heads. An error common to all keys
does not count, because softmax ignores it. Every layer gets the K, V and Q of the model with an
exact cache, so errors of earlier layers do not count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from halfbyte.evaluation.caches import CacheName, names_and_scales
from halfbyte.kvcache import KVRecipe, KVScales, PageLayout, read_tokens, reshape_and_cache
from halfbyte.kvcache.layer import LayerQuantization
from halfbyte.layouts import KVCacheDType
from halfbyte.models import layer_specs
from halfbyte.models.attention_functions import KVHandle, dense_attention
from halfbyte.models.kv_calibration import run_rows

_MAX_SCORES = 2**24
"""Attention logits of one KV head held at once: 64 MiB in float32."""


@dataclass(frozen=True)
class LayerResult:
    """One layer's figures with one format and recipe.

    `k_sqnr_db` and `v_sqnr_db` are of K and V as they are read back, in dB, infinite without any
    error; `logit_error` is the root mean variance of the attention logits' errors under the
    attention weights, in nats; the last tokens that a recipe keeps in 16 bits count as exact.
    """

    kv_cache_dtype: str
    kv_recipe: str
    layer: int
    k_sqnr_db: float
    v_sqnr_db: float
    logit_error: float


def evaluate_layers(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    *,
    kv_scales: KVScales | None = None,
    kv_recipes: Sequence[str | KVRecipe] | None = None,
    tokenizer: object = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LayerResult]:
    """Measure formats and recipes layer by layer.

    Args:
        model: a transformers model of a supported architecture; it is left as it was.
        windows: token ids.
        kv_cache_dtypes, kv_recipes, kv_scales, tokenizer: as for `evaluate_perplexity`.
        on_progress: called with (windows done, windows in all).

    Returns:
        Results by format, then recipe, then layer.

    Raises:
        ValueError: no windows, an empty one or one longer than the model's context, or as
            `evaluate_perplexity`.
    """
    context = getattr(model.config, "max_position_embeddings", 2**31)
    lengths = [len(window) for window in windows]
    if not lengths or not 0 < min(lengths) <= max(lengths) <= context:
        raise ValueError(f"windows: expected one or more of 1 to {context} tokens, got {lengths}")
    names, scales = names_and_scales(model, kv_cache_dtypes, kv_recipes, kv_scales, tokenizer, None)
    caches = [_RoundTrip(model, name, scales[name]) for name in dict.fromkeys(names)]
    rows = [torch.tensor([list(window)], device="cpu") for window in windows]
    run_rows(model, rows, _LayerObserver(caches), on_progress)
    by_name = {cache.name: cache for cache in caches}
    return [result for name in names for result in by_name[name].results()]


class _LayerObserver(DynamicCache):
    """Shows each layer's Q, K and V to formats, and lets the model attend to K and V as they are.

    Args:
        caches: formats and recipes under test.
    """

    def __init__(self, caches: Sequence["_RoundTrip"]) -> None:
        super().__init__()
        self._caches = caches

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See `transformers.Cache`; handles for the attention."""
        handle = KVHandle(self, layer_idx, key_states, value_states)
        return handle, handle

    def attend(
        self,
        handle: KVHandle,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `PackedCache`."""
        key, value = handle.key[0].transpose(0, 1), handle.value[0].transpose(0, 1)
        for cache in self._caches:
            cache.measure(handle.layer, query[0], key, value, options)
        return dense_attention(query, handle.key, handle.value, mask, options)


class _RoundTrip:
    """One format and recipe: stores a window's K and V of a layer, reads them back, and compares.

    Args:
        name: format and recipe.
        scales: of the model; None where the format has none.
    """

    def __init__(self, model: PreTrainedModel, name: CacheName, scales: KVScales | None) -> None:
        self.name = name
        dtype, recipe = name
        specs = layer_specs(model.config, model.dtype, dtype, recipe=recipe)
        self._layouts = [spec.layout for spec in specs]
        self._quantizations = [
            LayerQuantization.of(
                scales, layer, layout.k_dtype, layout.v_dtype, recipe, model.device
            )
            for layer, layout in enumerate(self._layouts)
        ]
        self._sums = [_LayerSums() for _ in specs]

    def measure(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        """Add one window.

        Args:
            query: `[heads, tokens, D]`.
            key, value: `[tokens, kv_heads, D]` and `[tokens, kv_heads, Dv]`.
            options: as for `PackedCache.attend`.
        """
        found_key, found_value = self._read_back(layer, key, value)
        sums, recent = self._sums[layer], self.name.recipe.recent_tokens
        sums.key.add(key, found_key)
        sums.value.add(value, found_value)
        kv_heads = key.shape[1]
        sinks = options["sinks"]
        sinks = None if sinks is None else sinks.float().unflatten(0, (kv_heads, -1))
        queries = query.float().unflatten(0, (kv_heads, -1))
        for head in range(kv_heads):
            sums.add_variance(
                queries[head],
                key[:, head].float(),
                found_key[:, head],
                None if sinks is None else sinks[head],
                recent,
                options,
            )

    def results(self) -> list[LayerResult]:
        """Results of all layers."""
        dtype, recipe = self.name
        return [
            LayerResult(
                dtype.value, recipe.name, layer, sums.key.db(), sums.value.db(), sums.logit_error()
            )
            for layer, sums in enumerate(self._sums)
        ]

    def _read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V from packed pages, float32."""
        layout: PageLayout = self._layouts[layer]
        k_scale, v_scale, transform = self._quantizations[layer]
        positions = torch.arange(len(key), device=key.device)
        num_pages = -(-len(key) // layout.block_size)
        pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=key.device)
        scales = (k_scale, v_scale)
        options: dict[str, Any] = {"transform": transform, "positions": positions}
        reshape_and_cache(key, value, pages, positions, layout, *scales, **options)
        return read_tokens(pages, positions, layout, *scales, **options)


class _Noise:
    """Energies of a signal and of its error."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Add a tensor and its erroneous copy, of one shape."""
        exact = exact.double()
        self._signal += float(exact.square().sum())
        self._noise += float((found.double() - exact).square().sum())

    def db(self) -> float:
        """10 log10 of the ratio of the energies."""
        if self._noise == 0:
            return math.inf
        return 10 * math.log10(self._signal / self._noise) if self._signal else -math.inf


class _LayerSums:
    """Sums of one layer's errors."""

    def __init__(self) -> None:
        self.key, self.value = _Noise(), _Noise()
        self._variance = 0.0
        self._queries = 0

    def logit_error(self) -> float:
        """See `LayerResult`."""
        return math.sqrt(self._variance / self._queries)

    def add_variance(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        found: torch.Tensor,
        sinks: torch.Tensor | None,
        recent: int,
        options: dict[str, Any],
    ) -> None:
        """Add the variances of one KV head's causal attention.

        Args:
            query: float32 `[group, tokens, D]`.
            key, found: float32 `[tokens, D]`, exact and read back.
            sinks: float32 `[group]`, which take part in the softmax; or None.
            recent: keys of fewer than this many tokens before the query are exact.
            options: as for `PackedCache.attend`.
        """
        group, tokens, _ = query.shape
        rows = max(1, _MAX_SCORES // (group * tokens))
        columns = torch.arange(tokens, device=query.device)
        for begin in range(0, tokens, rows):
            q = query[:, begin : begin + rows]
            distance = columns[begin : begin + rows, None] - columns
            hidden = distance < 0
            if options["sliding_window"] is not None:
                hidden |= distance >= options["sliding_window"]
            logits, with_found = (_logits(q, keys, options) for keys in (key, found))
            error = (with_found - logits).masked_fill_(hidden | (distance < recent), 0.0)
            logits = logits.masked_fill_(hidden, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[:, None, None].expand(group, len(q[0]), 1)], -1)
            weights = logits.softmax(-1)[..., :tokens]
            mean = (weights * error).sum(-1)
            variance = (weights * (error - mean[..., None]).square()).sum(-1)
            if sinks is not None:  # the sink's own error is 0
                variance += (1 - weights.sum(-1)).clamp_(min=0) * mean.square()
            self._variance += float(variance.sum(dtype=torch.float64))
            self._queries += variance.numel()


def _logits(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """float32 `[group, queries, keys]`, before masks."""
    logits = (query @ key.T) * options["scale"]
    if options["softcap"] is None:
        return logits
    return torch.tanh(logits / options["softcap"]) * options["softcap"]
