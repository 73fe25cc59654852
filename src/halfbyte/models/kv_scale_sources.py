"""KV scales of a checkpoint: tensors, `kv_scales.json`, a calibration in the user's cache folder.

Those in its folder were read when the model was loaded (`CheckpointKVScales`).
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfbyte.checkpoints import CheckpointError, fingerprint
from halfbyte.checkpoints.stored_kv_scales import StoredKVScale
from halfbyte.files import cache_folder
from halfbyte.kvcache import KV_SCALES_FILE, KVRecipe, KVScales, get_kv_cache_quant_method
from halfbyte.kvcache.scales import NO_SCALE, shape_of_model
from halfbyte.layouts import KVCacheDType
from halfbyte.models.architectures import num_draft_layers
from halfbyte.models.checkpoint_folder import CheckpointKVScales

logger = logging.getLogger("halfbyte")

_CACHE_SUBFOLDER = "kv_scales"


def first_stored(
    config: Any, stored: CheckpointKVScales, recipe: KVRecipe | None
) -> KVScales | None:
    """The first scales that suit a recipe; else the first with a calibration that is too old, so
    that `KVScales.calibration_for` refuses it by name.

    Args:
        config: transformers config of the model, or the dict of its `config.json`.
        stored: what the folder has.
        recipe: as for `find_kv_scales`.

    Returns:
        None if there are none.

    Raises:
        ValueError: broken scales; none but those of tensors with unknown names.
    """
    unknown = stored.stored.unknown
    sources = (
        lambda: from_tensors(stored, config) if unknown is None else None,
        lambda: _from_file(stored),
        lambda: _from_later_file(stored),
        lambda: _from_cache(stored),
    )
    found, older = False, None
    for source in sources:
        scales = source()
        if scales is None:
            continue
        found = True
        if recipe is None or scales.suits(recipe):
            if unknown is not None:
                logger.warning(
                    "%s: %s: not used, because the meaning of this name is not known; KV scales "
                    "are from %s",
                    *(stored.folder, unknown, scales.source),
                )
            return scales
        logger.info("KV cache scales from %s: not used, kv_recipe needs others", scales.source)
        if older is None and scales.calibration is not None:
            older = scales
    if not found and unknown is not None:
        raise stored.stored.refusal()
    return older


def from_tensors(
    found: CheckpointKVScales, config: Any, *, of_draft: bool = False
) -> KVScales | None:
    """Scales of tensors, for the declared format of each layer, FP8 if none is declared.

    Args:
        found: what the folder has.
        config: as for `first_stored`.
        of_draft: those of a draft in the layers after the model's, by layer of the draft.

    Returns:
        None if there are none.

    Raises:
        ValueError: scales of more layers than model and draft have; a broken declaration.
    """
    stored, folder = found.stored.by_layer, found.folder
    if not stored:
        return None
    num_stored, num_draft = max(stored) + 1, num_draft_layers(config)
    known = shape_of_model(config).get("num_hidden_layers")
    num_layers = known if isinstance(known, int) else num_stored
    if num_stored > num_layers + num_draft:
        draft = f" and its draft {num_draft}" if num_draft else ""
        raise ValueError(
            f"KV scales from {folder}: {num_stored} layers, the model has {num_layers}{draft}"
        )
    first, end = (num_layers, num_layers + num_draft) if of_draft else (0, num_layers)
    formats = KVCacheDType.layers_from_checkpoint(found.declaring, num_layers + num_draft)
    formats = formats[first:end]
    stored = {layer - first: pair for layer, pair in stored.items() if first <= layer < end}
    if not stored:
        return None
    declares = any(dtype.has_global_scale for layer in stored for dtype in formats[layer])
    if not declares and not all(scale.is_of_nvfp4 for pair in stored.values() for scale in pair):
        logger.warning("%s: has KV scales but declares no format; used as FP8 scales", folder)
    amax = [(NO_SCALE, NO_SCALE)] * (end - first)
    names: dict[str, None] = {}
    for layer, scales in stored.items():
        k_method, v_method = (
            get_kv_cache_quant_method(_format_of(scale, declared))
            for scale, declared in zip(scales, formats[layer], strict=True)
        )
        names |= {k_method.name: None, v_method.name: None}
        (k_scale, v_scale), source = scales, f"layer {first + layer} of {folder}"
        one = KVScales.from_global_scales(
            [k_scale.value], [v_scale.value], k_method, v_method, source
        )
        amax[layer] = one.amax_of_layer(0)
    k_amax, v_amax = zip(*amax, strict=True)
    return KVScales(k_amax, v_amax, f"checkpoint (for {', '.join(names)})")


def _format_of(scale: StoredKVScale, declared: KVCacheDType) -> KVCacheDType:
    """The format that a scale is for."""
    if scale.is_of_nvfp4:
        return KVCacheDType.NVFP4
    return declared if declared.has_global_scale else KVCacheDType.FP8_E4M3


def _from_file(stored: CheckpointKVScales) -> KVScales | None:
    if isinstance(stored.file, CheckpointError):
        raise stored.file
    return stored.file and _named_as_file(stored.file)


def _from_later_file(stored: CheckpointKVScales) -> KVScales | None:
    """A `kv_scales.json` written or replaced after the model was loaded; used for recipes that the
    scales read at loading do not support."""
    if stored.identity is None:  # read just now, not at loading: nothing can be later
        return None
    later = KVScales.load(stored.folder)
    if later is None or later == stored.file:
        return None
    if not stored.is_unchanged:
        logger.warning(
            "%s: not used, because the folder's checkpoint is not the one that was loaded",
            stored.folder / KV_SCALES_FILE,
        )
        return None
    return _named_as_file(later)


def _named_as_file(scales: KVScales) -> KVScales:
    return replace(scales, source=f"{KV_SCALES_FILE} ({scales.source})")


def _from_cache(stored: CheckpointKVScales) -> KVScales | None:
    cache = cache_folder()
    try:
        if cache is None or not (cache / _CACHE_SUBFOLDER).is_dir():
            return None  # skips computing the fingerprint
        file = file_in_cache(cache, stored.identity or fingerprint(stored.folder))
        if not file.is_file():
            return None
    except (CheckpointError, OSError) as error:  # no fingerprint, or a folder of another user
        logger.debug("no calibration is looked for in the cache folder: %s", error)
        return None
    scales = KVScales.load_file(file)
    return replace(scales, source=f"{file} ({scales.source})")


def file_in_cache(cache: Path, identity: str) -> Path:
    """Path of a calibration in the user's cache folder.

    Args:
        cache: the folder.
        identity: fingerprint of the checkpoint.
    """
    return cache / _CACHE_SUBFOLDER / f"{identity}.json"
