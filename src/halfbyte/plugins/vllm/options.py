"""What a user may say to the plug-in, in `--additional-config '{"halfbyte": {…}}'`.

It is part of vLLM's configuration, which travels to every worker of every node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from halfbyte.kvcache.recipe import DEFAULT, RECIPES, KVRecipe
from halfbyte.layouts import KVCacheDType

SECTION = "halfbyte"
_LINEAR = ("auto", "on", "off")


@dataclass(frozen=True)
class Options:
    """The section `halfbyte` of vLLM's additional config.

    Raises:
        ValueError: a value that cannot be; the message names the option.
    """

    kv_scales: str | None = None
    """Path of a `kv_scales.json`, on every node; by default scales are looked for: see `scales`."""
    draft_kv_scales: str | None = None
    """The same for the layers of a speculative draft."""
    k_dtype: str | None = None
    """Format of K where vLLM's cache dtype is `nvfp4`; needs a vLLM that lets a backend define its
    pages (0.32)."""
    v_dtype: str | None = None
    """Format of V, likewise."""
    kv_recipe: str | None = None
    """What is done to K and V in NVFP4 before they are packed, see `halfbyte.kvcache.KVRecipe`; by
    default see `recipes.resolve_options`."""
    linear: str = "auto"
    """NVFP4 linear layers on halfbyte's kernels: `auto` with halfbyte's attention on CPUs and on
    SM80 to SM90, `on` wherever they run, `off` never."""

    def __post_init__(self) -> None:
        for name in ("kv_scales", "draft_kv_scales"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{SECTION}.{name}: expected a path, got {value!r}")
        for name in ("k_dtype", "v_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ValueError(f"{SECTION}.{name}: expected a KV cache dtype, got {value!r}")
            try:
                KVCacheDType.parse(value)
            except ValueError as error:
                raise ValueError(f"{SECTION}.{name}: {error}") from None
        if self.kv_recipe is not None and self.kv_recipe not in RECIPES:
            raise ValueError(
                f"{SECTION}.kv_recipe: expected one of {', '.join(RECIPES)}, got {self.kv_recipe!r}"
            )
        if self.linear not in _LINEAR:
            raise ValueError(
                f"{SECTION}.linear: expected one of {', '.join(_LINEAR)}, got {self.linear!r}"
            )

    @property
    def recipe(self) -> KVRecipe:
        """What of `kv_recipe` the bytes of a page depend on."""
        return RECIPES[self.kv_recipe or DEFAULT].of_pages

    @property
    def recent_tokens(self) -> int:
        """Last tokens that `kv_recipe` keeps in 16 bits, where there are rings: see `recent`."""
        return RECIPES[self.kv_recipe or DEFAULT].recent_tokens

    def of_attention(self) -> list[str]:
        """Options other than their defaults that have no effect without halfbyte's attention."""
        defaults = Options()
        return [
            field.name
            for field in fields(self)
            if field.name != "linear" and getattr(self, field.name) != getattr(defaults, field.name)
        ]

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Of vLLM's `additional_config`; defaults where it has no section `halfbyte`.

        Raises:
            ValueError: the section is no object, or has an unknown or invalid option.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        section = additional_config.get(SECTION)
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise ValueError(f"additional_config.{SECTION}: expected an object, got {section!r}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(map(str, section)) - set(known))
        if unknown:
            raise ValueError(
                f"additional_config.{SECTION}: unknown option {', '.join(unknown)}; expected "
                f"{', '.join(known)}"
            )
        fields_given = dict(section)
        if isinstance(linear := section.get("linear"), bool):  # YAML's on and off
            fields_given["linear"] = "on" if linear else "off"
        return cls(**fields_given)


class LastModel:
    """Options and dtype of the model that was made last in this process.

    vLLM asks the backend's class for the pages of a model right after it has made its layers, and
    gives it no configuration.
    """

    options = Options()
    dtype = torch.bfloat16
    resolved: tuple[Any, Any, Options] | None = None
    """vLLM's configuration of it, the additional one, and what `resolve_options` made of them."""
    without_rings: Any = None
    """vLLM's configuration of the model of which the log has said why."""
    with_scales: Any = None
    """vLLM's configuration of the model for which scales were found last."""
