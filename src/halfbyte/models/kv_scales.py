"""Finds the global scales of K and V. Sources, in order of precedence:

1. the user's scales,
2. tensors in the checkpoint's files,
3. `kv_scales.json` in the checkpoint's folder,
4. a calibration in the user's cache folder (for read-only checkpoint folders),
5. a calibration pass in memory.

The source is logged. 1.0 is never assumed: K and V of small models would fall into the subnormals
of E4M3, and long-range retrieval would fail.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from halfbyte.assets import calibration_text
from halfbyte.checkpoints import CheckpointError, fingerprint
from halfbyte.checkpoints.dialects.modelopt import MODELOPT_FILE
from halfbyte.checkpoints.kv_scales import StoredScale
from halfbyte.files import cache_folder
from halfbyte.kvcache import KV_SCALES_FILE, KVRecipe, KVScales, get_kv_cache_quant_method
from halfbyte.kvcache.scales import NO_SCALE, shape_of_model
from halfbyte.layouts import KVCacheDType
from halfbyte.models.architectures import num_draft_layers
from halfbyte.models.checkpoint_folder import CheckpointKVScales, checkpoint_of, declaring
from halfbyte.models.kv_calibration import calibrate, calibration_tokens, usual_first_tokens
from halfbyte.models.local_files import ModelLoadError, folder_of
from halfbyte.models.tokenizer import has_tokenizer, load_tokenizer

logger = logging.getLogger("halfbyte")

_CACHE_SUBFOLDER = "kv_scales"
_SMALLEST_AMAX, _LARGEST_AMAX = 2.0**-10, 2.0**16
"""Range of amax of K and V in known models, first tokens included."""


def find_kv_scales(
    folder: Path,
    config: Any,
    *,
    given: KVScales | str | Path | None = None,
    recipe: KVRecipe | None = None,
) -> KVScales | None:
    """Find the scales of a model without running it.

    Args:
        folder: of its checkpoint.
        config: transformers config, or the dict of its `config.json`: gives the format that scales
            in the files are for, and the number of layers.
        given: the user's scales, a file of them, or a folder with a `kv_scales.json`; take
            precedence.
        recipe: if it transforms K, scales without a calibration are skipped, and those with an
            older one that does not suit it come last; None accepts any.

    Returns:
        Scales, with their `source`; None if there are none.

    Raises:
        ValueError: `given` does not exist; a broken file, or one with a scale of 0; scales for
            another number of layers. One line that names the file.
    """
    scales = _given(given)
    if scales is None:
        return _found(folder, config, None, recipe)
    _check_model(scales, config)
    return scales


def _found(
    folder: Path, config: Any, stored: CheckpointKVScales | None, recipe: KVRecipe | None
) -> KVScales | None:
    """Scales of a checkpoint; its folder is read unless that was done when it was loaded."""
    try:
        stored = CheckpointKVScales.read(folder, config) if stored is None else stored
        scales = _first(config, stored, recipe)
        if scales is not None:
            _check_model(scales, config)
        return scales
    except CheckpointError:
        raise
    except ValueError as error:  # of what is in the folder
        raise CheckpointError(str(error)) from None


def _first(config: Any, stored: CheckpointKVScales, recipe: KVRecipe | None) -> KVScales | None:
    """The first scales that suit a recipe; else the first with a calibration that is too old, so
    that `KVScales.calibration_for` refuses it by name.

    Raises:
        ValueError: broken scales; none but those of tensors with unknown names.
    """
    unknown = stored.stored.unknown
    sources = (
        lambda: _from_checkpoint(stored, config) if unknown is None else None,
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


def resolve_kv_scales(
    model: PreTrainedModel,
    dtypes: set[KVCacheDType],
    *,
    given: KVScales | str | Path | None = None,
    tokenizer: Any = None,
    recipe: KVRecipe | None = None,
) -> KVScales | None:
    """Scales for a loaded model whose layers use the formats `dtypes`.

    Args:
        model: a loaded transformers model; its folder is searched if it was loaded from one.
        dtypes: formats in use.
        given: as for `find_kv_scales`.
        tokenizer: for the calibration text; by default the folder's, and without a folder a fixed
            sequence of token ids is used.
        recipe: as for `find_kv_scales`.

    Returns:
        None if no format needs scales.

    Raises:
        ValueError: as `find_kv_scales`; the calibration failed.
    """
    if not any(dtype.has_global_scale for dtype in dtypes):
        return None
    scales = known_kv_scales(model, given, recipe)
    if scales is None:
        checkpoint = checkpoint_of(model)
        folder = folder_of(model) if checkpoint is None else checkpoint.folder
        if folder is None and model.config.name_or_path:
            logger.warning(
                "%s: neither a folder here nor in the hub's cache, so KV scales in its files are "
                "not known",
                model.config.name_or_path,
            )
        if tokenizer is None and folder is not None and has_tokenizer(folder):
            tokenizer = load_tokenizer(folder)
        ids, source = calibration_tokens(tokenizer, model.config, calibration_text())
        scales = calibrate(model, ids, source, first_tokens=usual_first_tokens(tokenizer))
    _check_model(scales, model.config)
    logger.info("KV cache scales: %s", scales.source)
    return scales


def known_kv_scales(
    model: PreTrainedModel,
    given: KVScales | str | Path | None = None,
    recipe: KVRecipe | None = None,
) -> KVScales | None:
    """Scales of a loaded model, without running it; arguments and errors as of `find_kv_scales`.

    Those that its folder had when it was loaded. For models that transformers loaded without our
    quantizer, those that the folder has now.

    Raises:
        ModelLoadError: the folder that transformers loaded the model from is gone.
    """
    if given is not None:
        return _given(given)
    checkpoint = checkpoint_of(model)
    if checkpoint is not None:  # known since it was loaded, even if the folder was moved
        return _found(checkpoint.folder, model.config, checkpoint.kv_scales, recipe)
    folder = folder_of(model)
    if folder is None:
        return None
    return _found(folder, model.config, None, recipe)


def find_draft_kv_scales(folder: Path, config: Any) -> KVScales | None:
    """Scales of a draft that is stored as further layers of its target (MTP), among the tensors.

    Args:
        folder: of the target's checkpoint.
        config: of the target.

    Returns:
        Scales by layer of the draft; None if there are none.

    Raises:
        CheckpointError: as `find_kv_scales`.
    """
    try:
        found = CheckpointKVScales.read(folder, config)
        return _from_checkpoint(found, config, of_draft=True)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def cached_calibration(folder: Path) -> Path | None:
    """Path of a model's calibration in the user's cache folder.

    Neither the file nor its folder need exist.

    Args:
        folder: of the model's checkpoint.

    Returns:
        None if there is no cache folder, see `files.cache_folder`.

    Raises:
        CheckpointError: no fingerprint can be computed for the folder.
    """
    cache = cache_folder()
    return cache and _cached(cache, fingerprint(folder))


def declared_format(folder: Path, config: Any) -> KVCacheDType:
    """The cache format that a checkpoint declares, see `KVCacheDType.from_checkpoint`.

    Args:
        folder: of the checkpoint.
        config: transformers config, or the dict of its `config.json`.

    Raises:
        ValueError: an unsupported format, or several; a broken file.
    """
    return KVCacheDType.from_checkpoint(declaring(folder, config))


def adopt_declaration(model: PreTrainedModel) -> None:
    """Add the cache that ModelOpt's file declares to a model's config, for `auto`.

    transformers does not read that file, so a model that it loaded without our quantizer does not
    have the declaration.

    Raises:
        CheckpointError: as `find_kv_scales`.
    """
    config: Any = model.config
    if checkpoint_of(model) is not None or getattr(config, "quantization_config", None):
        return
    try:
        folder = folder_of(model)
    except ModelLoadError:
        return  # raised where scales are needed
    if folder is not None and (folder / MODELOPT_FILE).is_file():
        section = declaring(folder, config)
        if section is not config:
            config.quantization = dict(section)


def _given(given: KVScales | str | Path | None) -> KVScales | None:
    if given is None or isinstance(given, KVScales):
        return given
    path = Path(given)
    file = path / KV_SCALES_FILE if path.is_dir() else path
    scales = KVScales.load_file(file)
    return replace(scales, source=f"{file} ({scales.source})")


def _from_checkpoint(
    found: CheckpointKVScales, config: Any, *, of_draft: bool = False
) -> KVScales | None:
    """Scales of tensors: the model's, or those of a draft in the layers after the model's."""
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


def _format_of(scale: StoredScale, declared: KVCacheDType) -> KVCacheDType:
    """The format that a scale is for."""
    if scale.is_of_nvfp4:
        return KVCacheDType.NVFP4
    return declared if declared.has_global_scale else KVCacheDType.FP8_E4M3


def _from_file(stored: CheckpointKVScales) -> KVScales | None:
    if isinstance(stored.file, CheckpointError):
        raise stored.file
    return stored.file and _named_as_file(stored.file)


def _from_later_file(stored: CheckpointKVScales) -> KVScales | None:
    """`kv_scales.json` that was written or replaced after the model was loaded, for recipes that
    the scales of then do not suit."""
    if stored.identity is None:  # not kept from loading, but read just now
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
        file = _cached(cache, stored.identity or fingerprint(stored.folder))
        if not file.is_file():
            return None
    except (CheckpointError, OSError) as error:  # no fingerprint, or a folder of another user
        logger.debug("no calibration is looked for in the cache folder: %s", error)
        return None
    scales = KVScales.load_file(file)
    return replace(scales, source=f"{file} ({scales.source})")


def _cached(cache: Path, identity: str) -> Path:
    return cache / _CACHE_SUBFOLDER / f"{identity}.json"


def _check_model(scales: KVScales, config: Any) -> None:
    """Raise ValueError for scales that are recognizably another model's; warn of unusual ones."""
    for side, amax in (("K", scales.k_amax), ("V", scales.v_amax)):
        for layer, value in enumerate(amax):
            if value is not NO_SCALE and not _SMALLEST_AMAX <= value <= _LARGEST_AMAX:
                logger.warning(
                    "KV scales from %s: layer %d has a scale for |%s| up to %g; is it an encode "
                    "scale (the reciprocal), or in another unit?",
                    *(scales.source, layer, side, value),
                )
                break
    shape = shape_of_model(config)
    for name in shape:  # in the order of `shape_of_model`, so that the message is deterministic
        if name in scales.shape and scales.shape[name] != shape[name]:
            raise ValueError(
                f"KV scales from {scales.source}: of a model with {name} {scales.shape[name]}, "
                f"this one has {shape[name]}"
            )
    num_layers = shape.get("num_hidden_layers")
    if num_layers is not None and scales.num_layers != num_layers:
        raise ValueError(
            f"KV scales from {scales.source}: {scales.num_layers} layers, "
            f"the model has {num_layers}"
        )
