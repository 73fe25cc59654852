"""Global scales of K and V of the layers that vLLM runs, the target's and a draft's.

vLLM's own scale is 1.0 if a checkpoint has none; halfbyte's kernels never use it. Sources, in order
of precedence: the option `kv_scales`, the checkpoint, `kv_scales.json` in its folder, a calibration
in the user's cache folder. Without scales the run fails with the command that creates them.
"""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.kvcache import KVRecipe, KVScales
from halfbyte.kvcache.calibration import (
    ErrorCosts,
    KVCalibration,
    LayerCalibration,
    RopeAverages,
)
from halfbyte.kvcache.recipe import SEGMENT
from halfbyte.plugins.vllm.options import OptionError, Options

logger = logging.getLogger("halfbyte")

DUMMY_AMAX = 8.0
"""amax of every layer of a model with dummy weights (for benchmarks)."""


@dataclass(frozen=True)
class LayerPlace:
    """Model (target or draft) of a layer, and its index there."""

    is_draft: bool
    layer: int


def place_of(layer_name: str, layer_number: int, num_target_layers: int) -> LayerPlace:
    """Locate a vLLM layer.

    Args:
        layer_name: vLLM's; names of a separate draft model begin with `draft_model.`, and those of
            built-in draft layers (MTP) of some models with `mtp.`.
        layer_number: the number in the name. Drafts that share the target's prefix (EAGLE, MTP)
            continue its numbering.
        num_target_layers: layers of the target model.
    """
    if layer_name.startswith("draft_model.") or "mtp" in layer_name.split(".")[:2]:
        return LayerPlace(True, layer_number)
    if layer_number >= num_target_layers:
        return LayerPlace(True, layer_number - num_target_layers)
    return LayerPlace(False, layer_number)


def heads_of_rank(total: int, own: int, rank: int, ranks: int) -> slice:
    """KV heads of a tensor-parallel rank, as vLLM shards them.

    Args:
        total: of the model.
        own: per rank: its share, or one if there are fewer heads than ranks (replicated).
    """
    start = rank * own if total >= ranks else rank * total // ranks
    return slice(start, start + own)


@contextmanager
def on_the_host() -> Iterator[None]:
    """Undo vLLM's default device and dtype during model creation."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@on_the_host()
def scales_of_model(
    model_config: Any,
    load_config: Any,
    given: str | None,
    option: str,
    recipe: KVRecipe | None = None,
) -> KVScales:
    """Find the scales of a model that vLLM runs.

    Args:
        model_config: vLLM's `ModelConfig`, of the target or the draft.
        load_config: vLLM's `LoadConfig`.
        given: path given as an option.
        option: the option's name, for messages.
        recipe: of the run.

    Raises:
        ValueError: no scales, or broken files; one line with what to do.
    """
    if given is None and has_no_weights(load_config):
        num_layers = _num_layers(model_config.hf_text_config)
        amax = (DUMMY_AMAX,) * num_layers
        logger.warning("dummy weights: KV cache scales for values up to %g", DUMMY_AMAX)
        calibration = None
        if recipe is not None and recipe.changes_k:
            calibration = _dummy_calibration(model_config)
        return KVScales(amax, amax, "dummy weights", calibration)
    folder, config = place_of_scales(model_config, load_config, given, option)
    scales = find_scales(folder, config, given, option, recipe)
    if scales is None:
        raise no_scales(model_config, load_config, option)
    return scales


def find_scales(
    folder: Path, config: Any, given: str | None, option: str, recipe: KVRecipe | None = None
) -> KVScales | None:
    """`find_kv_scales`, whose errors name the option if its file is the reason.

    Args:
        option: field of `Options` that `given` is from.

    Raises:
        OptionError: a given file that is absent, broken, or another model's.
        ValueError: a broken file in the model's folder.
    """
    from halfbyte.models import find_kv_scales

    try:
        return find_kv_scales(folder, config, given=given, recipe=recipe)
    except (ValueError, OSError) as error:
        if given is None:
            raise
        raise OptionError([option], str(error)) from None


def no_scales(model_config: Any, load_config: Any, option: str) -> ValueError:
    """The error for a model without scales; arguments as of `scales_of_model`."""
    return ValueError(
        f"halfbyte: no KV cache scales for {model_config.model}: run "
        f"`{_calibrate_command(model_config, load_config)}`, or give a file with "
        "--additional-config "
        f'\'{{"halfbyte": {{"{option}": "PATH"}}}}\''
    )


def scales_of_draft(vllm_config: Any, options: Options, layer: int = 0) -> KVScales:
    """Find the scales of a run's draft.

    A draft inside its target's checkpoint (MTP) has none but the option's, and those of tensors of
    the layers after the target's.

    Args:
        vllm_config: vLLM's, with a draft's configuration.
        options: of the run.
        layer: of the draft that needs them, for messages.

    Raises:
        ValueError: as `scales_of_model`.
    """
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    draft, given, recipe = speculative.draft_model_config, options.draft_kv_scales, options.recipe
    is_inside = given is None and speculative.method != "draft_model"
    if not (is_inside and is_same_folder(target, draft, load_config)):
        return scales_of_model(draft, load_config, given, "draft_kv_scales", recipe)
    stored = _scales_inside(target, load_config)
    if stored is not None and stored.suits(recipe):
        return stored
    found = "no KV cache scales of its own"
    if stored is not None:
        found = f"KV cache scales without the calibration that kv_recipe {options.kv_recipe} needs"
    raise ValueError(
        f"halfbyte: draft layer {layer} of {draft.model} has {found}; give a file of them as "
        "draft_kv_scales in --additional-config, or leave the draft's cache unquantized"
    )


@on_the_host()
def _scales_inside(target: Any, load_config: Any) -> KVScales | None:
    if has_no_weights(load_config):
        return None
    from halfbyte.models.choose_kv_scales import find_draft_kv_scales

    return find_draft_kv_scales(folder_of(target, load_config), target.hf_config)


def place_of_scales(
    model_config: Any, load_config: Any, given: str | None, option: str
) -> tuple[Path, Any]:
    """Folder and configuration for `find_kv_scales`; arguments as of `scales_of_model`."""
    # A given file needs no folder (GGUF files have none).
    folder = Path() if given is not None else folder_of(model_config, load_config)
    config = model_config.hf_config
    if option != "kv_scales":
        # vLLM changes the type and sizes of a draft's configuration.
        named = {
            "num_hidden_layers": _num_layers(config),
            "quantization_config": getattr(config, "quantization_config", None),
        }
        config = {name: value for name, value in named.items() if value is not None}
    return folder, config


def _num_layers(config: Any) -> int:
    """Layers of a model. A draft inside the target's checkpoint (MTP) has `n_predict` of them; vLLM
    sets its `num_hidden_layers` to 0 for some models and leaves the target's for others."""
    return int(getattr(config, "n_predict", None) or config.num_hidden_layers)


def _dummy_calibration(model_config: Any) -> KVCalibration:
    """Zero means, no error propagation, and angles of a standard rotary embedding: costs as much
    time as a real calibration."""
    config = model_config.hf_text_config
    heads, size = model_config.get_total_num_kv_heads(), model_config.get_head_size()
    starts = torch.arange(0, config.max_position_embeddings, SEGMENT, device="cpu") + SEGMENT / 2
    angles = starts[:, None] * 10000.0 ** -(torch.arange(size // 2, device="cpu") / (size // 2))
    rope = RopeAverages(
        angles.cos().repeat(1, 2),
        torch.cat([-angles.sin(), angles.sin()], 1),
        torch.arange(size, device="cpu").roll(size // 2),
    )
    none = torch.zeros(1, heads, size, device="cpu")
    nothing = torch.zeros(heads, size, size, dtype=torch.float64, device="cpu")
    costs = ErrorCosts.of(nothing, nothing[:, 0])
    layer = LayerCalibration(none[0], (DUMMY_AMAX,) * 4, DUMMY_AMAX, none, none, 0, costs)
    return KVCalibration(SEGMENT, (0,), (layer,) * config.num_hidden_layers, (rope,))


def check_scales(vllm_config: Any, options: Options, recipe: KVRecipe) -> None:
    """Raise ValueError if the model being created has no scales that its recipe can use.

    A draft's scales are checked after loading, when its layers can be told from the target's.

    Args:
        vllm_config: vLLM's.
        options: of the run.
        recipe: of the layers; `plain` if recipes do not apply to K's format.
    """
    model_config = vllm_config.model_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if model_config is not draft:
        given, load_config = options.kv_scales, vllm_config.load_config
        scales = scales_of_model(model_config, load_config, given, "kv_scales", options.recipe)
        if recipe.changes_k:
            scales.calibration_for(recipe)


def is_same_folder(model_config: Any, draft_config: Any, load_config: Any) -> bool:
    """Whether a draft is part of its target's checkpoint, whose scales do not apply to it."""
    names = {str(config.model) for config in (model_config, draft_config)}
    if len(names) == 1:
        return True
    return folder_of(model_config, load_config) == folder_of(draft_config, load_config)


def has_no_weights(load_config: Any) -> bool:
    """Whether the run uses dummy weights (for benchmarks)."""
    return str(getattr(load_config, "load_format", "")).endswith("dummy")


def _calibrate_command(model_config: Any, load_config: Any) -> str:
    words = ["halfbyte", "calibrate", str(model_config.model)]
    for name, value in (
        ("--revision", getattr(model_config, "revision", None)),
        ("--download-dir", getattr(load_config, "download_dir", None)),
    ):
        if value is not None:
            words += [name, str(value)]
    return shlex.join(words)


def folder_of(model_config: Any, load_config: Any) -> Path:
    """The folder of a model's files, downloaded if needed."""
    from halfbyte.models.local_files import local_folder

    return local_folder(
        str(model_config.model),
        revision=getattr(model_config, "revision", None),
        cache_dir=getattr(load_config, "download_dir", None),
    )
