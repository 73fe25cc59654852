"""NVIDIA ModelOpt's declarations: `hf_quant_config.json`, or the copy of it in `config.json`.

`hf_quant_config.json` says `{"quantization": {"quant_algo", "exclude_modules", "group_size",
"kv_cache_quant_algo", "quantized_layers"}}`; the copy (ModelOpt's `convert_hf_quant_config_format`)
calls the exclusions `ignore`, and the cache's format `kv_cache_scheme`, which is an object for FP8
and a bare name for the others. Exclusions are names or shell wildcards of module names. Its
`config_groups` say once more how weights and activations are quantized; where all of them leave
activations alone, `NVFP4` layers without an activation scale are W4A16.

`MIXED_PRECISION` names an algorithm for each layer. FP8 layers are read where they stand beside
NVFP4 ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.dialects.base import (
    CheckpointError,
    Declaration,
    LayerGroup,
    Scheme,
    declared_cache,
    patterns,
    unknown_scheme,
)
from halfbyte.checkpoints.dialects.schemes import (
    NVFP4_EXPECTED,
    describe,
    is_fp8_input,
    is_fp8_weight,
    is_nvfp4_input,
    is_nvfp4_weight,
)

_SCHEMES: dict[str, Scheme] = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4-a16"}
_MIXED_SCHEMES: dict[str, Scheme] = {
    **_SCHEMES,
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_MIXED = "MIXED_PRECISION"
_DECLARED = (
    *("quant_algo", "group_size", "quantized_layers", "exclude_modules", "ignore"),
    *("kv_cache_quant_algo", "kv_cache_scheme"),
)
_GROUP_SIZE = 16
_GROUP_FIELDS = ("targets", "weights", "input_activations")
_LAYER_FIELDS = ("quant_algo", "group_size", "pre_quant_scale", "has_zero_point", "lora_rank")
_REFUSED = ("pre_quant_scale", "has_zero_point", "lora_rank")
_WILD = frozenset("*?[")


class ModelOptDeclaration(Declaration):
    """See `Declaration`; the first group that names a layer, or one that it is in, has it."""

    dialect = "modelopt"

    def scheme_of(self, module_name: str) -> Scheme | None:
        """See `Declaration.scheme_of`."""
        if self._ignored.first(module_name) is not None:
            return None
        place = self._targets.first(module_name)
        return None if place is None else self._schemes[place]

    @cached_property
    def _ignored(self) -> "_Patterns":
        return _Patterns(self.ignore)

    @cached_property
    def _targets(self) -> "_Patterns":
        targets = (target for group in self.groups for target in group.targets)
        return _Patterns("*" if target == "Linear" else target for target in targets)

    @cached_property
    def _schemes(self) -> list[Scheme]:
        """Of every target."""
        return [group.scheme for group in self.groups for _ in group.targets]


class _Patterns:
    """Names of modules and wildcards, each for a module and for those inside it.

    Names are looked up: a mixture's declaration may list every projection of every expert.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names: dict[str, int] = {}
        self._wildcards: list[tuple[int, str]] = []
        for place, pattern in enumerate(patterns):
            if not _WILD.isdisjoint(pattern):
                self._wildcards.append((place, pattern))
            else:
                self._names.setdefault(pattern, place)

    def first(self, name: str) -> int | None:
        """The place of the first pattern that covers a module, None if none does."""
        ends = (i for i, letter in enumerate(f"{name}.") if letter == ".")
        places = [self._names[name[:end]] for end in ends if name[:end] in self._names]
        places += [place for place, pattern in self._wildcards if fnmatchcase(name, pattern)][:1]
        return min(places, default=None)


def read(
    folder: str | Path, section: Mapping[str, Any], config_section: Mapping[str, Any]
) -> Declaration:
    """The declaration of a ModelOpt checkpoint.

    Args:
        folder: for messages.
        section: what declares: `quantization` of `hf_quant_config.json`, or `quantization_config`.
        config_section: `quantization_config` of `config.json`; empty where there is none.

    Raises:
        CheckpointError: an algorithm, group size or KV cache format that is not read here.
    """
    nested = section.get("quantization")
    section = nested if isinstance(nested, Mapping) else section
    algo = section.get("quant_algo")
    whole = {**_undeclared(config_section), **section}
    groups: tuple[LayerGroup, ...] = ()
    if algo == _MIXED:
        groups = tuple(_mixed_groups(folder, section))
    elif algo is not None:
        groups = (LayerGroup(_scheme(folder, section, _SCHEMES, "quant_algo"), ("Linear",)),)
    _check_groups(folder, whole, groups)
    where = "exclude_modules" if "exclude_modules" in section else "ignore"
    return ModelOptDeclaration(
        groups=groups,
        ignore=patterns(folder, section, where),
        kv_cache_dtype=declared_cache(folder, section),
        leaves_activations=_leaves_activations(whole),
        section=whole,
    )


def _undeclared(config_section: Mapping[str, Any]) -> dict[str, Any]:
    """What a copy has beside the declaration, which the original is asked for."""
    return {name: value for name, value in config_section.items() if name not in _DECLARED}


def _leaves_activations(section: Mapping[str, Any]) -> bool:
    """Whether all groups of a declaration that has some quantize weights alone."""
    groups = section.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    return bool(groups) and all(
        isinstance(group, Mapping)
        and group.get("weights") is not None
        and group.get("input_activations") is None
        for group in groups
    )


def _check_groups(
    folder: str | Path, section: Mapping[str, Any], groups: tuple[LayerGroup, ...]
) -> None:
    """Raise CheckpointError where `config_groups` contradict the algorithms that are declared."""
    described = section.get("config_groups")
    if not groups or described is None:
        return
    if not isinstance(described, Mapping):
        raise unknown_scheme(folder, "config_groups", repr(described), "an object")
    schemes = {group.scheme for group in groups}
    for name, group in described.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise unknown_scheme(folder, where, repr(group), "an object")
        for field, value in group.items():
            if field not in _GROUP_FIELDS and value not in (None, False):
                raise unknown_scheme(folder, f"{where}.{field}", describe(value), "none")
        weights, inputs = group.get("weights"), group.get("input_activations")
        is_fp8 = is_fp8_weight(weights) and (inputs is None or is_fp8_input(inputs))
        is_nvfp4 = is_nvfp4_weight(weights) and (inputs is None or is_nvfp4_input(inputs))
        if not ((is_fp8 and "fp8" in schemes) or (is_nvfp4 and schemes - {"fp8"})):
            algo = section.get("quant_algo")
            expected = f"what quant_algo {algo} is: {NVFP4_EXPECTED}"
            found = f"{describe(weights)}; input_activations {describe(inputs)}"
            raise unknown_scheme(folder, f"{where}.weights", found, expected)


def _mixed_groups(folder: str | Path, section: Mapping[str, Any]) -> Iterator[LayerGroup]:
    layers = section.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise CheckpointError(
            f"{folder}: quantized_layers: expected an object with the layers of {_MIXED}, "
            f"found {layers!r}"
        )
    targets: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        layer = layer if isinstance(layer, Mapping) else {"quant_algo": layer}
        if layer.get("quant_algo") is None:
            continue
        where = f"quantized_layers[{name!r}].quant_algo"
        unknown = [x for x, y in layer.items() if x not in _LAYER_FIELDS and y]
        if unknown:
            found = f"{unknown[0]} {layer[unknown[0]]!r}"
            raise unknown_scheme(folder, f"quantized_layers[{name!r}]", found, "quant_algo alone")
        targets.setdefault(_scheme(folder, layer, _MIXED_SCHEMES, where), []).append(name)
    for scheme, names in targets.items():
        yield LayerGroup(scheme, tuple(names))


def _scheme(
    folder: str | Path, section: Mapping[str, Any], schemes: Mapping[str, Scheme], where: str
) -> Scheme:
    algo = str(section["quant_algo"]).upper()
    if algo not in schemes:
        mixed = (_MIXED,) if schemes is _SCHEMES else ()
        raise unknown_scheme(folder, where, repr(algo), f"one of {', '.join((*schemes, *mixed))}")
    scheme = schemes[algo]
    group_size = section.get("group_size", _GROUP_SIZE)
    if scheme != "fp8" and group_size not in (_GROUP_SIZE, None):
        raise unknown_scheme(folder, f"group_size of {algo}", repr(group_size), str(_GROUP_SIZE))
    for name in _REFUSED:
        if section.get(name):
            raise unknown_scheme(folder, f"{name} of {algo}", repr(section[name]), "none")
    return scheme
