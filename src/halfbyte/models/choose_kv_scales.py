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
from halfbyte.files import cache_folder, shortened
from halfbyte.kvcache import KV_SCALES_FILE, KVRecipe, KVScales
from halfbyte.kvcache.scales import NO_SCALE, shape_of_model
from halfbyte.layouts import KVCacheDType
from halfbyte.models.checkpoint_folder import CheckpointKVScales, checkpoint_of, declaring
from halfbyte.models.kv_calibration import calibrate, calibration_tokens, usual_first_tokens
from halfbyte.models.kv_scale_sources import file_in_cache, first_stored, from_tensors
from halfbyte.models.local_files import ModelLoadError, folder_of
from halfbyte.models.tokenizer import has_tokenizer, load_tokenizer

logger = logging.getLogger("halfbyte")

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
        scales = first_stored(config, stored, recipe)
        if scales is not None:
            _check_model(scales, config)
        return scales
    except CheckpointError:
        raise
    except ValueError as error:  # the folder's files are broken, not the caller's arguments
        raise CheckpointError(str(error)) from None


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
        return from_tensors(found, config, of_draft=True)
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
    return cache and file_in_cache(cache, fingerprint(folder))


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
    if checkpoint_of(model) is not None:
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
            found = shortened(str(scales.shape[name]))
            raise ValueError(
                f"KV scales from {scales.source}: of a model with {name} {found}, this one has "
                f"{shape[name]}"
            )
    num_layers = shape.get("num_hidden_layers")
    if num_layers is not None and scales.num_layers != num_layers:
        raise ValueError(
            f"KV scales from {scales.source}: {scales.num_layers} layers, "
            f"the model has {num_layers}"
        )
