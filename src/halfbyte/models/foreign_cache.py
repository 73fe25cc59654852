"""Keeps other packages from quantizing K and V before halfbyte's cache does.

compressed-tensors hooks the attention modules of a checkpoint that declares a quantized cache and
rounds K and V before they reach any cache; halfbyte's cache would round them a second time, to
other values. Older files declare the cache as quantized outputs of K's and V's projections, which
the package rounds in the projections' forward pass. So halfbyte hides the declaration from that
package when it loads a model, and removes both when it makes a cache for a model that
`from_pretrained` loaded.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from halfbyte.checkpoints.errors import CheckpointError

logger = logging.getLogger("halfbyte")

_HOOKS_OF = "compressed_tensors.modeling."
_OUTPUTS = ("k_proj", "v_proj")
"""Older files declare the cache as quantized outputs of these layers, before RoPE."""
_OTHERS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def without_cache(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the `quantization_config` of a checkpoint that another package reads.

    Returns:
        The part for that package, without the cache; and the part that declares the cache, empty
        if none is declared.

    Raises:
        CheckpointError: K and V are declared in different formats, or one of them alone.
    """
    rest, cache = dict(section), {}
    for key in [key for key in rest if key.startswith("kv_cache_")]:
        if rest.get(key) is not None:
            cache[key], rest[key] = rest[key], None
    groups = rest.get("config_groups")
    if isinstance(groups, Mapping):
        rest["config_groups"] = groups = dict(groups)
        outputs: dict[str, Any] = {}
        for name, group in groups.items():
            if sides := _sides_of_cache(group):
                outputs.update(dict.fromkeys(sides, group["output_activations"]))
                groups[name] = {**group, "output_activations": None}
        if outputs:
            schemes = [outputs.get(side) for side in _OUTPUTS]
            if schemes[0] != schemes[1]:
                raise CheckpointError(
                    "config_groups: expected the same output_activations for k_proj and v_proj, "
                    f"found {schemes[0]} and {schemes[1]}"
                )
            cache.setdefault("kv_cache_scheme", schemes[0])
    return rest, cache


def release_cache_hooks(model: nn.Module) -> None:
    """Keep compressed-tensors from rounding K and V in a model that `from_pretrained` loaded.

    Removes its hooks of the cache, and the quantization of outputs of K's and V's projections where
    it declares the cache; `auto` then stands for that format. Logged if there was any.

    Raises:
        CheckpointError: as `without_cache`.
    """
    released = 0
    for module in model.modules():
        hooks = module._forward_pre_hooks, module._forward_hooks
        of_package = [
            (registry, key)
            for registry in hooks
            for key, hook in registry.items()
            if str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF)
        ]
        for registry, key in of_package:
            del registry[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)
        released += bool(of_package)
    released += _release_outputs(model)
    if released:
        logger.warning(
            "removed compressed-tensors' cache hooks from %d attention modules: K and V are "
            "quantized by halfbyte's cache only",
            released,
        )


def _release_outputs(model: nn.Module) -> int:
    """Leave the outputs that declare a cache as they are; returns the number of their layers."""
    quantized = {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "quantization_scheme", None), "output_activations", None)
    }
    if not quantized:
        return 0
    config: Any = model.config
    declared = config.quantization_config
    section = declared if isinstance(declared, Mapping) else declared.to_dict()
    cache = without_cache(section)[1]
    released = set()
    for name, module in quantized.items():
        scheme: Any = module.quantization_scheme
        group = {"targets": scheme.targets, "output_activations": {}}
        attention, _, projection = name.rpartition(".")
        if projection in _sides_of_cache(group):
            # The package rounds outputs by the module's scheme. A copy, because all modules of a
            # group share the object.
            module.quantization_scheme = scheme.model_copy(update={"output_activations": None})
            released.add(attention)
    if released and section.get("kv_cache_scheme") is None:
        config.quantization = {**(getattr(config, "quantization", None) or {}), **cache}
    return len(released)


def _sides_of_cache(group: Any) -> set[str]:
    """Which of `_OUTPUTS` a group quantizes, if it quantizes the outputs of no other layers."""
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        return set()
    if not isinstance(group.get("output_activations"), Mapping):
        return set()
    sides: set[str] = set()
    for target in group["targets"]:
        found = {name for name in (*_OUTPUTS, *_OTHERS) if _matches(target, name)}
        if not found or not found <= set(_OUTPUTS):
            return set()
        sides |= found
    return sides


def _matches(target: object, projection: str) -> bool:
    """Whether a target of compressed-tensors matches layers of a name, in any layer."""
    if not isinstance(target, str):
        return False
    if not target.startswith("re:"):
        return target.rpartition(".")[2] == projection
    pattern = target.removeprefix("re:")
    try:
        matches = re.match(pattern, f"model.layers.0.self_attn.{projection}") is not None
    except re.error:
        return False
    return matches or pattern.removesuffix("$").endswith(projection)
