"""Resolves the options of a vLLM run and its default recipe."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.kvcache import KVScales
from halfbyte.kvcache.recipe import DEFAULT
from halfbyte.plugins.vllm.formats import LayerFormat
from halfbyte.plugins.vllm.options import LastModel, Options
from halfbyte.plugins.vllm.registry import is_halfbyte
from halfbyte.plugins.vllm.scales import (
    find_scales,
    has_no_weights,
    is_same_folder,
    no_scales,
    on_the_host,
    place_of_scales,
)

logger = logging.getLogger("halfbyte")


def resolve_options(vllm_config: Any) -> Options:
    """The options of a run with its recipe, which target and draft share.

    The default is `balanced`; `plain` if the scales of target or draft fit untransformed K only, if
    the calibrated means of K do not cover the run's context, or if piecewise CUDA graphs contain
    the cache update.

    Args:
        vllm_config: vLLM's, of the run or of its draft.

    Raises:
        ValueError: as `Options.parse`; broken scale files.
    """
    additional = vllm_config.additional_config
    target, draft = _models(vllm_config)
    known = LastModel.resolved
    if known is not None and known[0] is target and known[1] is additional:
        return known[2]
    options = Options.parse(additional)
    if options.kv_recipe is None and target is not None:
        options = replace(options, kv_recipe=_default_recipe(vllm_config, target, draft, options))
    LastModel.resolved = (target, additional, options)
    return options


def _models(vllm_config: Any) -> tuple[Any, Any]:
    """vLLM's configurations of the run's target and draft; None if absent.

    While a draft's layers are created, vLLM puts the draft's configuration in place of the
    target's.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    target = getattr(vllm_config, "model_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and target is draft:
        target = getattr(speculative, "target_model_config", None) or target
    return target, draft


def _default_recipe(vllm_config: Any, target: Any, draft: Any, options: Options) -> str:
    from halfbyte.models.kv_setup import recipe_for

    if not has_nvfp4_keys(vllm_config, options):
        return "plain"
    if captures_stores(vllm_config):
        logger.warning("kv_recipe plain, because piecewise CUDA graphs contain the cache's update")
        return "plain"
    speculative, load_config = vllm_config.speculative_config, vllm_config.load_config
    found = [_known_scales(target, load_config, options.kv_scales, "kv_scales")]
    if draft is not None:
        load_config = getattr(speculative, "draft_load_config", None) or load_config
        given = options.draft_kv_scales
        own_dtype = getattr(speculative, "kv_cache_dtype", None)
        is_alike = own_dtype in (None, vllm_config.cache_config.cache_dtype)
        if is_alike and (given is not None or not is_same_folder(target, draft, load_config)):
            found.append(_known_scales(draft, load_config, given, "draft_kv_scales"))
    for scales in found:
        if scales is None:
            continue
        name = recipe_for(scales)
        if scales.calibration is None:
            return name
        limit = scales.calibration.max_position
        if limit < target.max_model_len:
            logger.warning(
                "kv_recipe plain: scales from %s have means of K for only %d of %d tokens",
                *(scales.source, limit, target.max_model_len),
            )
            return "plain"
    return DEFAULT


@on_the_host()
def _known_scales(
    model_config: Any, load_config: Any, given: str | None, option: str
) -> KVScales | None:
    """Scales with a calibration, else any; None without scales or without weights."""
    from halfbyte.models.kv_setup import calibrated_or_any

    if given is None and has_no_weights(load_config):
        return None
    folder, config = place_of_scales(model_config, load_config, given, option)
    return calibrated_or_any(lambda recipe: find_scales(folder, config, given, option, recipe))


def check_local_scales(vllm_config: Any, options: Options) -> None:
    """Raise ValueError if a run's target in a folder needs scales, and there are none for it.

    Skipped if layers may have different cache dtypes, and for models that `halfbyte calibrate` does
    not support. Reads the folder's `config.json`, because vLLM edits its copy for submodels.
    Workers check again: this neither chooses nor keeps scales.

    Args:
        vllm_config: vLLM's.
        options: of the run.
    """
    from halfbyte.checkpoints.dialects.registry import read_config
    from halfbyte.models import SUPPORTED_MODEL_TYPES

    target, load_config = vllm_config.model_config, vllm_config.load_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if target is None or target is draft:
        return
    folder = Path(str(target.model))
    is_uniform = is_halfbyte(vllm_config.attention_config.backend) and not getattr(
        vllm_config.cache_config, "kv_cache_dtype_skip_layers", None
    )
    # Dummy weights need no scales, and `hf_overrides` may fit the model to given ones.
    given = options.kv_scales
    leaves_it = has_no_weights(load_config) if given is None else bool(target.hf_overrides)
    if leaves_it or not is_uniform or not (folder / "config.json").is_file():
        return
    # For other models a worker's error gives the actual reason.
    model_type = getattr(target.hf_text_config, "model_type", None)
    if model_type not in SUPPORTED_MODEL_TYPES or target.get_head_size() % 16:
        return
    # Without a requested recipe any scales suffice: they decide which recipe is the default.
    as_given = replace(options, kv_recipe=options.kv_recipe or "plain")
    try:
        formats = LayerFormat.of(vllm_config.cache_config.cache_dtype, torch.bfloat16, as_given)
    except ValueError:  # rejected later, by name
        return
    if not (formats.k.has_global_scale or formats.v.has_global_scale):
        return
    recipe = as_given.recipe
    scales = find_scales(folder, read_config(folder), given, "kv_scales", recipe)
    if scales is None:
        raise no_scales(target, load_config, "kv_scales")
    if formats.k.is_nvfp4 and recipe.changes_k:
        scales.calibration_for(recipe)


def has_nvfp4_keys(vllm_config: Any, options: Options) -> bool:
    """Whether K of the run's cache dtype is NVFP4, so that a recipe applies."""
    as_it_is = replace(options, kv_recipe="plain")
    try:
        formats = LayerFormat.of(vllm_config.cache_config.cache_dtype, torch.bfloat16, as_it_is)
    except ValueError:  # rejected later, by name
        return False
    return formats.k.is_nvfp4


def captures_stores(vllm_config: Any) -> bool:
    """Whether piecewise CUDA graphs contain the cache update."""
    compilation: Any = getattr(vllm_config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    if mode is None:
        return False
    # halfbyte supports full graphs of uniform batches only (`get_cudagraph_support`), so with mode
    # FULL vLLM captures all other batches piecewise, if attention splits the graph.
    becomes_piecewise = mode.has_full_cudagraphs() and (
        mode.mixed_mode().has_full_cudagraphs() and compilation.splitting_ops_contain_attention()
    )
    if not mode.has_piecewise_cudagraphs() and not becomes_piecewise:
        return False
    if getattr(compilation, "use_inductor_graph_partition", False):
        return True
    splits_at_updates = getattr(compilation, "splitting_ops_contain_kv_cache_update", None)
    return splits_at_updates is not None and not splits_at_updates()
