"""Which recipe a run of vLLM's has where nobody says so."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.recipe import DEFAULT
from halfbyte.plugins.vllm.formats import LayerFormat
from halfbyte.plugins.vllm.options import LastModel, Options
from halfbyte.plugins.vllm.scales import folder_of, has_no_weights

logger = logging.getLogger("halfbyte")


def settled(vllm_config: Any) -> Options:
    """The options of a run, with a recipe.

    By default it is `balanced`; `plain` where the scales that there are, the draft's among them,
    are for K as it is, where K has no means for the run's context, or where graphs of parts of the
    model hold what writes the cache.

    Args:
        vllm_config: vLLM's.

    Raises:
        ValueError: as `Options.parse`; broken files of scales.
    """
    model_config = getattr(vllm_config, "model_config", None)
    additional = vllm_config.additional_config
    known = LastModel.settled
    if known is not None and known[0] is model_config and known[1] is additional:
        return known[2]
    options = Options.parse(additional)
    if options.kv_recipe is None and model_config is not None:
        options = replace(options, kv_recipe=_default_recipe(vllm_config, options))
    LastModel.settled = (model_config, additional, options)
    return options


def _default_recipe(vllm_config: Any, options: Options) -> str:
    from halfbyte.models import find_kv_scales
    from halfbyte.models.kv_setup import recipe_for

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    if captures_stores(vllm_config) or not _has_nvfp4_keys(vllm_config, options):
        return "plain"
    if options.kv_scales is None and has_no_weights(load_config):
        return DEFAULT
    found: list[KVScales | None] = []
    if options.draft_kv_scales is not None:
        found.append(find_kv_scales(Path(), {}, given=options.draft_kv_scales))
    given = options.kv_scales
    folder = Path() if given is not None else folder_of(model_config, load_config)
    found.append(find_kv_scales(folder, model_config.hf_config, given=given))
    for scales in found:
        if scales is None:
            continue
        if recipe_for(scales) != DEFAULT or scales.calibration is None:
            return "plain"
        limit = scales.calibration.max_position
        if limit < model_config.max_model_len:
            logger.warning(
                "KV cache scales from %s: means of K for %d tokens of %d: kv_recipe plain",
                *(scales.source, limit, model_config.max_model_len),
            )
            return "plain"
    return DEFAULT


def _has_nvfp4_keys(vllm_config: Any, options: Options) -> bool:
    """Whether there is anything for a recipe to do."""
    as_it_is = replace(options, kv_recipe="plain")
    try:
        formats = LayerFormat.of(vllm_config.cache_config.cache_dtype, torch.bfloat16, as_it_is)
    except ValueError:  # refused later, by its name
        return False
    return formats.k.is_nvfp4


def captures_stores(vllm_config: Any) -> bool:
    """Whether graphs of parts of the model hold what writes the cache."""
    compilation = getattr(vllm_config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    if mode is None or not mode.has_piecewise_cudagraphs():
        return False
    if getattr(compilation, "use_inductor_graph_partition", False):
        return True
    splits_at_updates = getattr(compilation, "splitting_ops_contain_kv_cache_update", None)
    return splits_at_updates is not None and not splits_at_updates()
