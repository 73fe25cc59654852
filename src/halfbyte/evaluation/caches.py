"""Formats and recipes under test: a pool each, all fed the same tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from halfbyte.engine import ModelRunner
from halfbyte.kvcache import KVRecipe, KVScales, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.layouts import KVCacheDType
from halfbyte.models import KVQuantization, layer_specs, resolve_kv_scales
from halfbyte.models.kv_setup import KVSetup

CacheName = tuple[KVCacheDType, KVRecipe]


def cache_names(
    model: PreTrainedModel,
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    kv_recipes: Sequence[str | KVRecipe] | None,
    kv_scales: KVScales | None = None,
    attention_backend: str | None = None,
    tokenizer: object = None,
) -> list[CacheName]:
    """Every format with every recipe; those without recipes with `plain` alone.

    Args:
        kv_recipes: None for the one that `KVSetup.of` chooses with the other arguments.

    Raises:
        ValueError: an unknown format or recipe, no recipe, or a format that cannot store the
            model's head size.
    """
    formats = [
        layer_specs(model.config, model.dtype, name)[0].layout.k_dtype for name in kv_cache_dtypes
    ]
    if kv_recipes is None and any(name.is_nvfp4 for name in formats):
        options: dict[str, Any] = {"kv_scales": kv_scales, "attention_backend": attention_backend}
        kv_recipes = [KVSetup.of(model, "nvfp4", 16, tokenizer=tokenizer, **options).recipe]
    if kv_recipes is None:
        kv_recipes = ["plain"]
    recipes = [KVRecipe.parse(recipe) for recipe in kv_recipes]
    if not recipes:
        raise ValueError("kv_recipes: expected one or more")
    return [
        (name, recipe)
        for name in formats
        for recipe in (recipes if name.is_nvfp4 else [KVRecipe()])
    ]


def scales_of(
    model: PreTrainedModel, names: Sequence[CacheName], given: KVScales | None, tokenizer: object
) -> dict[CacheName, KVScales | None]:
    """Scales for each; found or measured once for all recipes that take the same.

    Args:
        given, tokenizer: as for `resolve_kv_scales`.
    """
    formats = {name for name, _ in names}
    found: dict[bool, KVScales | None] = {}
    for _, recipe in names:
        if recipe.changes_k not in found:
            found[recipe.changes_k] = resolve_kv_scales(
                model, formats, given=given, tokenizer=tokenizer, recipe=recipe
            )
    return {name: found[name[1].changes_k] for name in names}


class MeasuredCache:
    """One format's and recipe's pool.

    Args:
        name: format and recipe.
        scales: of the model; None where the format has none.
        num_tokens: of the longest sequence.
        num_seqs: sequences at once.
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
        """Of a page, over all layers."""
        return self.tables.pool.plan.bytes_per_token

    def log_probabilities(self, chunks: Sequence[tuple[int, list[int]]]) -> torch.Tensor:
        """float32 `[tokens, vocabulary]` after each of the next tokens of sequences."""
        for seq, ids in chunks:
            self.tables.append(seq, len(ids))
        return self.runner.run(chunks, all_logits=True).float().log_softmax(-1)
