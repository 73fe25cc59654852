"""Formats and recipes under test: one pool for each, all with the same tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from halfbyte.attention import check_attention_backend
from halfbyte.engine import ModelRunner
from halfbyte.kvcache import KVRecipe, KVScales, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.layouts import KVCacheDType
from halfbyte.models import KVQuantization, layer_specs, resolve_kv_scales
from halfbyte.models.kv_setup import KVSetup, applicable_recipe


class CacheName(NamedTuple):
    """What is under test."""

    dtype: KVCacheDType
    """Of K."""
    recipe: KVRecipe


def names_and_scales(
    model: PreTrainedModel,
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    kv_recipes: Sequence[str | KVRecipe] | None,
    kv_scales: KVScales | None,
    tokenizer: object,
    attention_backend: str | None,
) -> tuple[list[CacheName], dict[CacheName, KVScales | None]]:
    """Every format with every recipe (K other than NVFP4: only `plain`), and their scales.

    Args:
        kv_cache_dtypes: formats.
        kv_recipes: None for the default of `KVSetup.of`; see also `applicable_recipe`.
        kv_scales, tokenizer: as for `resolve_kv_scales`, called once for all recipes with the same
            scales.
        attention_backend: name of an attention backend, or None to choose.

    Raises:
        NoImplementationError: a backend that is unknown or does not support the model's device.
        ValueError: an unknown format or recipe, no recipe, or a format that cannot store the
            model's head size.
    """
    check_attention_backend(attention_backend, model.device)
    formats = [
        layer_specs(model.config, model.dtype, name)[0].layout.k_dtype for name in kv_cache_dtypes
    ]
    found: dict[bool, KVScales | None] = {}
    if kv_recipes is None and any(name.is_nvfp4 for name in formats):
        setup = KVSetup.of(
            model,
            "nvfp4",
            16,
            kv_scales=kv_scales,
            tokenizer=tokenizer,
            attention_backend=attention_backend,
        )
        kv_recipes = [setup.recipe]
        found[setup.recipe.changes_k] = setup.scales
    recipes = [KVRecipe.parse(r) for r in (["plain"] if kv_recipes is None else kv_recipes)]
    if not recipes:
        raise ValueError("kv_recipes: expected one or more")
    for recipe in recipes:
        applicable_recipe(recipe, set(formats))  # warns
    names = [
        CacheName(name, recipe)
        for name in formats
        for recipe in (recipes if name.is_nvfp4 else [KVRecipe()])
    ]
    for _, recipe in names:
        if recipe.changes_k not in found:
            found[recipe.changes_k] = resolve_kv_scales(
                model, set(formats), given=kv_scales, tokenizer=tokenizer, recipe=recipe
            )
    return names, {name: found[name.recipe.changes_k] for name in names}


class MeasuredCache:
    """The pool of one format and recipe.

    Args:
        name: format and recipe.
        scales: of the model; None if the format has none.
        num_tokens: max tokens per sequence.
        num_seqs: max concurrent sequences.
        block_size: tokens per page.
        attention_backend: name of an attention backend, or None to choose.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: CacheName,
        scales: KVScales | None,
        num_tokens: int,
        num_seqs: int = 1,
        block_size: int = 16,
        attention_backend: str | None = None,
    ) -> None:
        self.dtype, self.recipe = name
        specs = layer_specs(model.config, model.dtype, self.dtype, block_size, recipe=self.recipe)
        plan = plan_kv_cache(specs)
        pages = sum(-(-num_tokens // group.block_size) for group in plan.groups)
        pool = PagedKVPool(plan, 1 + num_seqs * pages, model.device)
        recent = RecentTokens.of(plan, self.recipe, model.dtype, model.device, 1 + num_seqs)
        self.tables = SequenceTables(pool, recent=recent)
        quantization = KVQuantization.of(pool, scales, self.recipe)
        self.runner = ModelRunner(model, self.tables, quantization, attention_backend)

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes per token, over all layers."""
        return self.tables.pool.plan.bytes_per_token

    def log_probabilities(self, chunks: Sequence[tuple[int, list[int]]]) -> torch.Tensor:
        """Log probabilities after each of the given next tokens: float32 `[tokens, vocabulary]`."""
        for seq, ids in chunks:
            self.tables.append(seq, len(ids))
        return self.runner.run(chunks, all_logits=True).float().log_softmax(-1)
