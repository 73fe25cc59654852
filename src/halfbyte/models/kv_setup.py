"""Setup of a model's cache: specs of its layers, scales and recipe."""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from halfbyte.attention.registry import ATTENTION_BACKENDS
from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.kvcache.recipe import DEFAULT, RECIPES
from halfbyte.kvcache.specs import KVCacheSpec
from halfbyte.layouts import KVCacheDType
from halfbyte.models.architectures import LayerDTypes, layer_specs
from halfbyte.models.choose_kv_scales import adopt_declaration, known_kv_scales, resolve_kv_scales
from halfbyte.models.foreign_cache import release_cache_hooks

logger = logging.getLogger("halfbyte")


class KVSetup(NamedTuple):
    """Specs, scales and recipe of all layers."""

    specs: Sequence[KVCacheSpec]
    scales: KVScales | None
    """None if no format needs scales."""
    recipe: KVRecipe

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        kv_cache_dtype: LayerDTypes,
        block_size: int,
        *,
        v_cache_dtype: LayerDTypes | None = None,
        keep_all: bool = False,
        kv_scales: KVScales | str | Path | None = None,
        kv_recipe: str | KVRecipe | None = None,
        attention_backend: str | None = None,
        tokenizer: Any = None,
    ) -> "KVSetup":
        """Find the scales, or calibrate.

        Args:
            model: a loaded transformers model.
            kv_cache_dtype, block_size, v_cache_dtype, keep_all: as for `layer_specs`.
            kv_scales, tokenizer: as for `resolve_kv_scales`.
            kv_recipe: by default see `default_recipe`; see also `applicable_recipe`.
            attention_backend: the requested one, if any.

        Raises:
            ValueError: as those functions do; an unknown recipe.
        """

        def specs_for(recipe: KVRecipe) -> Sequence[KVCacheSpec]:
            return layer_specs(
                model.config,
                model.dtype,
                kv_cache_dtype,
                block_size,
                v_cache_dtype=v_cache_dtype,
                keep_all=keep_all,
                recipe=recipe,
            )

        release_cache_hooks(model)
        adopt_declaration(model)
        recipe = KVRecipe.parse("plain" if kv_recipe is None else kv_recipe)
        specs = specs_for(recipe)
        if kv_recipe is None and any(spec.layout.k_dtype.is_nvfp4 for spec in specs):
            recipe = default_recipe(model, kv_scales, attention_backend)
            specs = specs_for(recipe)
        formats = {d for s in specs for d in (s.layout.k_dtype, s.layout.v_dtype)}
        recipe = applicable_recipe(recipe, formats)
        scales = resolve_kv_scales(
            model, formats, given=kv_scales, tokenizer=tokenizer, recipe=recipe
        )
        is_measured = scales is None or scales.calibration is not None
        if kv_recipe is None and recipe.changes_k and not is_measured:
            recipe = RECIPES["plain"]  # calibration failed, as logged
            specs = specs_for(recipe)
        return cls(specs, scales, recipe)


def applicable_recipe(recipe: KVRecipe, formats: Collection[KVCacheDType]) -> KVRecipe:
    """The recipe; `plain`, with a warning, if no format is NVFP4, as recipes change no other.

    Args:
        formats: of K and V of all layers.
    """
    plain = RECIPES["plain"]
    if recipe == plain or any(name.is_nvfp4 for name in formats):
        return recipe
    logger.warning(
        "kv_recipe %s changes NVFP4 only, so kv_recipe is plain for %s",
        recipe.name,
        ", ".join(sorted(formats)),
    )
    return plain


def default_recipe(
    model: PreTrainedModel,
    kv_scales: KVScales | str | Path | None = None,
    attention_backend: str | None = None,
) -> KVRecipe:
    """`balanced`; `plain` if the known scales have no calibration, or the requested backend
    supports only `plain`.

    Args:
        model: this and the other arguments: see `KVSetup.of`.

    Raises:
        ValueError: as `find_kv_scales`.
    """
    backend = attention_backend and ATTENTION_BACKENDS.get(attention_backend)
    if backend and not backend.takes_transforms:
        logger.info("attention backend %s supports only kv_recipe plain", attention_backend)
        return RECIPES["plain"]
    scales = calibrated_or_any(lambda recipe: known_kv_scales(model, kv_scales, recipe))
    return RECIPES[recipe_for(scales)]


def calibrated_or_any(find: Callable[[KVRecipe | None], KVScales | None]) -> KVScales | None:
    """The scales that decide the default recipe: the first with a calibration, even where `plain`
    would use a checkpoint's own scales; without any calibration, the first at all.

    Args:
        find: returns the scales that a recipe can use; for None, any scales.
    """
    return find(RECIPES[DEFAULT]) or find(None)


def recipe_for(scales: KVScales | None) -> str:
    """Name of the default recipe for known scales; logs a warning unless it is `balanced`."""
    if scales is None or scales.calibration is not None:
        return DEFAULT
    logger.warning(
        "KV cache scales from %s have no recipe statistics (means of K, first tokens, error "
        "weights), so kv_recipe is plain; `halfbyte calibrate MODEL` measures them for kv_recipe "
        "%s, which is more accurate",
        scales.source,
        DEFAULT,
    )
    return "plain"
