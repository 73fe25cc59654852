"""Keeps other packages from quantizing K and V before halfbyte's cache does.

compressed-tensors hooks the attention modules of a checkpoint that declares a quantized cache and
rounds K and V before they reach any cache; halfbyte's cache would round them a second time, to
other values. So halfbyte hides the declaration from that package when it loads a model, and removes
its hooks when it makes a cache for a model that `from_pretrained` loaded.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

logger = logging.getLogger("halfbyte")

_HOOKS_OF = "compressed_tensors.modeling."
_OUTPUTS = ("k_proj", "v_proj")
"""Older files declare the cache as quantized outputs of these layers, before RoPE."""


def without_cache(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the `quantization_config` of a checkpoint that another package reads.

    Returns:
        The part for that package, without the cache; and the part that declares the cache, empty
        if none is declared.
    """
    rest, cache = dict(section), {}
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if rest.get(key) is not None:
            cache[key], rest[key] = rest[key], None
    groups = rest.get("config_groups")
    if isinstance(groups, Mapping):
        rest["config_groups"] = groups = dict(groups)
        for name, group in groups.items():
            if _declares_cache(group):
                cache.setdefault("kv_cache_scheme", group["output_activations"])
                groups[name] = {**group, "output_activations": None}
    return rest, cache


def release_cache_hooks(model: nn.Module) -> None:
    """Remove compressed-tensors' cache hooks from a model; logged if there were any."""
    released = 0
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                released += 1
    if released:
        logger.warning(
            "removed compressed-tensors' cache hooks from %d attention modules: K and V are "
            "quantized by halfbyte's cache only",
            released,
        )


def _declares_cache(group: Any) -> bool:
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        return False
    targets = group["targets"]
    is_output = all(isinstance(t, str) and t.endswith(_OUTPUTS) for t in targets)
    return bool(targets) and is_output and isinstance(group.get("output_activations"), Mapping)
