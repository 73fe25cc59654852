"""Options of the plug-in, in `--additional-config '{"halfbyte": {…}}'`.

They are part of vLLM's configuration, which is sent to every worker on every node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from halfbyte.kvcache.recipe import DEFAULT, RECIPES, KVRecipe
from halfbyte.layouts import KVCacheDType

SECTION = "halfbyte"
_CHOICES = ("auto", "on", "off")
_OF_WEIGHTS = ("linear", "moe")
"""Options with these choices that do not need halfbyte's attention."""
_WITH_CHOICES = (*_OF_WEIGHTS, "elementwise")
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
"""vLLM's cache dtypes that halfbyte's attention supports."""
NEWER_CACHE_DTYPES = ("nvfp4_4over6",)
"""Further cache dtypes, for which vLLM 0.32 or later is needed."""
ALL_CACHE_DTYPES = (*CACHE_DTYPES, *NEWER_CACHE_DTYPES)
_SIDE_DTYPES = tuple(
    dict.fromkeys((*ALL_CACHE_DTYPES, *KVCacheDType.where(lambda row: row.is_quantized)))
)
"""Values of `k_dtype` and `v_dtype`, for messages."""


class OptionError(ValueError):
    """An invalid option.

    Args:
        names: fields of `Options`.
        problem: what was expected and given.
    """

    def __init__(self, names: Sequence[str], problem: str) -> None:
        super().__init__(f"{', '.join(f'{SECTION}.{name}' for name in names)}: {problem}")
        self.names, self.problem = names, problem


@dataclass(frozen=True)
class Options:
    """The section `halfbyte` of vLLM's additional config.

    Raises:
        OptionError: an invalid value.
    """

    kv_scales: str | None = None
    """Path of a `kv_scales.json`, on every node; by default scales are searched: see `scales`."""
    draft_kv_scales: str | None = None
    """The same for the layers of a speculative draft."""
    k_dtype: str | None = None
    """Format of K if vLLM's cache dtype is `nvfp4`; needs a vLLM in which backends define their
    pages (0.32)."""
    v_dtype: str | None = None
    """Format of V, likewise."""
    kv_recipe: str | None = None
    """How K and V are stored in NVFP4, see `halfbyte.kvcache.KVRecipe`; for the
    default see `recipes.resolve_options`."""
    linear: str = "auto"
    """NVFP4 linear layers on halfbyte's kernels: `auto` with halfbyte's attention on CPUs and
    SM80 to SM90, `on` on all supported hardware, `off` never."""
    moe: str = "auto"
    """NVFP4 and MXFP4 experts on halfbyte's kernels: `auto` with halfbyte's attention on CPUs and
    SM90, `on` on all supported hardware, `off` never. Layers that these kernels do not support are
    left to vLLM with `auto`, and are an error with `on`."""
    elementwise: str = "auto"
    """Norms, SwiGLU and rotary embedding on halfbyte's kernels, on Hopper with halfbyte's
    attention: `auto` for the runs of `layers.wants_layers`, `on` for all, `off` never."""

    def __post_init__(self) -> None:
        for name in ("kv_scales", "draft_kv_scales"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise OptionError([name], f"expected a path, got {value!r}")
        for name in ("k_dtype", "v_dtype"):
            value = getattr(self, name)
            if value is not None and not _is_cache_dtype(value):
                raise _not_among(name, _SIDE_DTYPES, value)
        if self.kv_recipe is not None and self.kv_recipe not in tuple(RECIPES):  # may be unhashable
            raise _not_among("kv_recipe", RECIPES, self.kv_recipe)
        for name in _WITH_CHOICES:
            if getattr(self, name) not in _CHOICES:
                raise _not_among(name, _CHOICES, getattr(self, name))

    @property
    def recipe(self) -> KVRecipe:
        """The part of `kv_recipe` that changes the bytes of a page."""
        return RECIPES[self.kv_recipe or DEFAULT].of_pages

    @property
    def recent_tokens(self) -> int:
        """Last tokens that `kv_recipe` keeps in 16 bits, if rings are possible: see `recent`."""
        return RECIPES[self.kv_recipe or DEFAULT].recent_tokens

    def of_attention(self) -> list[str]:
        """Options set by the user that have no effect without halfbyte's attention."""
        defaults = Options()
        return [
            field.name
            for field in fields(self)
            if field.name not in _OF_WEIGHTS
            and getattr(self, field.name) != getattr(defaults, field.name)
        ]

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Options in vLLM's `additional_config`; defaults if it has no section `halfbyte`.

        Raises:
            ValueError: the section is not an object, or has an unknown or invalid option.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        section = additional_config.get(SECTION)
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise ValueError(f"additional_config.{SECTION}: expected an object, got {section!r}")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in map(str, section) if name not in known]
        if unknown:
            names = ", ".join(x if x.isidentifier() else repr(x) for x in sorted(unknown))
            raise ValueError(
                f"additional_config.{SECTION}: unknown option {names}; expected {', '.join(known)}"
            )
        fields_given = dict(section)
        for name in _WITH_CHOICES:
            if isinstance(choice := section.get(name), bool):  # YAML's on and off
                fields_given[name] = "on" if choice else "off"
        return cls(**fields_given)


def _is_cache_dtype(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(KVCacheDType.parse(value))
    except ValueError:
        return False


def _not_among(name: str, choices: Iterable[str], got: object) -> OptionError:
    return OptionError([name], f"expected one of {', '.join(choices)}, got {got!r}")


def sides_refused(options: Options, needed: str, cache_dtype: str) -> OptionError:
    """The error for `k_dtype` or `v_dtype` with another cache dtype than they need."""
    names = [name for name in ("k_dtype", "v_dtype") if getattr(options, name)]
    need = "needs" if len(names) == 1 else "need"
    return OptionError(names, f"{need} --kv-cache-dtype {needed}, got {cache_dtype}")


class LastModel:
    """Options and dtype of the last model created in this process.

    vLLM asks the backend's class for a model's pages right after creating its layers, without a
    configuration.
    """

    options = Options()
    dtype = torch.bfloat16
    resolved: tuple[Any, Any, Options] | None = None
    """Its vLLM configuration, additional configuration, and result of `resolve_options`."""
    without_rings: Any = None
    """vLLM's configuration of the model for which the reason has been logged."""
    logged: Any = None
    """vLLM's configuration of the last model whose cache was logged."""
    of_layers: tuple[Any, Any] | None = None
    """vLLM's configuration of the last model with layers of `layers`, and what they share."""
    with_scales: Any = None
    """vLLM's configuration of the last model for which scales were found."""
