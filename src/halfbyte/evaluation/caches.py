"""Formats and recipes under test: a pool each, all fed the same tokens."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from halfbyte.attention import check_attention_backend
from halfbyte.engine import ModelRunner
from halfbyte.kvcache import KVRecipe, KVScales, PagedKVPool, SequenceTables, plan_kv_cache
from halfbyte.kvcache.recent import RecentTokens
from halfbyte.layouts import KVCacheDType
from halfbyte.models import KVQuantization, layer_specs, resolve_kv_scales
from halfbyte.models.kv_setup import KVSetup

CacheName = tuple[KVCacheDType, KVRecipe]


def names_and_scales(
    model: PreTrainedModel,
    kv_cache_dtypes: Sequence[str | KVCacheDType],
    kv_recipes: Sequence[str | KVRecipe] | None,
    kv_scales: KVScales | None,
    tokenizer: object,
    attention_backend: str | None,
) -> tuple[list[CacheName], dict[CacheName, KVScales | None]]:
    """Every format with every recipe, `plain` alone for K other than NVFP4; and scales of each.

    Args:
        kv_cache_dtypes: formats.
        kv_recipes: None for the one that `KVSetup.of` chooses.
        kv_scales, tokenizer: as for `resolve_kv_scales`, called once for all recipes that take the
            same scales.
        attention_backend: name of an attention backend, or None to choose.

    Raises:
        NoImplementationError: a backend that is unknown or not for the model's device.
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
    names = [
        (name, recipe)
        for name in formats
        for recipe in (recipes if name.is_nvfp4 else [KVRecipe()])
    ]
    for _, recipe in names:
        if recipe.changes_k not in found:
            found[recipe.changes_k] = resolve_kv_scales(
                model, set(formats), given=kv_scales, tokenizer=tokenizer, recipe=recipe
            )
    return names, {name: found[name[1].changes_k] for name in names}


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
