"""compressed-tensors' declarations: `quantization_config` of `config.json`.

`config_groups` give a scheme to the modules that `targets` name: exact names, `re:` patterns
(matched from the start of the name) or the class `Linear`; the most specific match wins in this
order. As in the package, of several patterns the first in the alphabet does, and of groups with the
same target the last.
`ignore` takes the same kinds. A group may be a preset's name with its targets. Packed NVFP4 layers
have the format `nvfp4-pack-quantized`, of the whole file or of a group.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import regex

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
    FP8_EXPECTED,
    NVFP4_EXPECTED,
    describe,
    is_fp8_input,
    is_fp8_weight,
    is_nvfp4_input,
    is_nvfp4_weight,
)
from halfbyte.dispatch import is_installed

NVFP4_FORMAT = "nvfp4-pack-quantized"
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_MIXED_FORMAT = "mixed-precision"
_OTHER_FORMATS = (
    *_FP8_FORMATS,
    "int-quantized",
    "marlin-24",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "pack-quantized",
)
_UNPACKED_FORMATS = ("dense", "fakequant")
_FORMATS = (NVFP4_FORMAT, _MIXED_FORMAT, *_OTHER_FORMATS, *_UNPACKED_FORMATS)
_PRESETS: dict[str, Scheme] = {"NVFP4": "nvfp4", "NVFP4A16": "nvfp4-a16"}
_SECONDS = 2
"""Max time to match a pattern with a name: some patterns backtrack for ever."""
_GROUP_FIELDS = ("targets", "weights", "input_activations", "format")


class CompressedTensorsDeclaration(Declaration):
    """See `Declaration`; names have precedence over regular expressions, these over classes."""

    dialect = "compressed-tensors"

    def scheme_of(self, module_name: str) -> Scheme | None:
        """See `Declaration.scheme_of`."""
        if self._ignored.best(module_name) is not None:
            return None
        target = self._targets.best(module_name)
        return None if target is None else self._schemes[target]

    @cached_property
    def _ignored(self) -> "_Patterns":
        return _Patterns(self.ignore)

    @cached_property
    def _targets(self) -> "_Patterns":
        return _Patterns(self._schemes)

    @cached_property
    def _schemes(self) -> dict[str, Scheme]:
        """By target; of groups with the same one the last counts."""
        return {target: group.scheme for group in self.groups for target in group.targets}


class _Patterns:
    """Names of linear layers, regular expressions, and their class.

    Names are looked up: a mixture's declaration may list every projection of every expert.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names = set(patterns)
        self._expressions = {
            pattern: regex.compile(pattern.removeprefix("re:"))
            for pattern in sorted(self._names)
            if pattern.startswith("re:")
        }

    def best(self, name: str) -> str | None:
        """The pattern that says most exactly that a linear layer is meant, None if none does."""
        if name in self._names:
            return name
        for pattern, expression in self._expressions.items():
            try:
                if expression.match(name, timeout=_SECONDS):
                    return pattern
            except TimeoutError:
                raise CheckpointError(
                    f"{pattern!r}: expected a pattern that can be matched, found one that takes "
                    f"more than {_SECONDS} s for {name}"
                ) from None
        return "Linear" if "Linear" in self._names else None


def read(folder: str | Path, section: Mapping[str, Any]) -> Declaration | None:
    """The declaration of a compressed-tensors checkpoint.

    Args:
        folder: for messages.
        section: `quantization_config`.

    Returns:
        None if no layer is NVFP4 and the package compressed-tensors, through which transformers
        reads its other formats, is installed.

    Raises:
        CheckpointError: a format, scheme or transform that is not read here.
    """
    form = section.get("format")
    groups = _object(folder, section, "config_groups")
    kv_cache_dtype = declared_cache(folder, section)
    if form in _OTHER_FORMATS and is_installed("compressed_tensors"):
        return None
    if form is not None and form not in _FORMATS:
        raise unknown_scheme(folder, "format", repr(form), f"one of {', '.join(_FORMATS)}")
    packed = bool(groups) and form not in _UNPACKED_FORMATS
    if packed:
        _refuse_extras(folder, section)
    return CompressedTensorsDeclaration(
        groups=tuple(_groups(folder, form, groups)) if packed else (),
        ignore=patterns(folder, section, "ignore"),
        kv_cache_dtype=kv_cache_dtype,
        section=section,
    )


def _groups(
    folder: str | Path, form: str | None, groups: Mapping[str, Any]
) -> Iterator[LayerGroup]:
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if isinstance(group, Mapping):
            if group.get("weights") is None:
                _check_attention(folder, where, group)
                continue
            scheme = _scheme(folder, where, group)
            _check_format(folder, where, group.get("format") or form, scheme)
            targets = group.get("targets")
        elif name.upper() in _PRESETS:
            scheme, targets = _PRESETS[name.upper()], group
        else:
            expected = f"an object or one of {', '.join(_PRESETS)}"
            raise unknown_scheme(folder, "config_groups", repr(name), expected)
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise unknown_scheme(folder, f"{where}.targets", repr(targets), "a list of names")
        for target in targets:
            _check_pattern(folder, where, target)
        yield LayerGroup(scheme, tuple(targets))


def _scheme(folder: str | Path, where: str, group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    for name, value in group.items():
        if name not in _GROUP_FIELDS and value not in (None, False):
            raise unknown_scheme(folder, f"{where}.{name}", describe(value), "null")
    if is_fp8_weight(weights) and (inputs is None or is_fp8_input(inputs)):
        return "fp8"
    if not is_nvfp4_weight(weights):
        expected = f"{NVFP4_EXPECTED}, or {FP8_EXPECTED}"
        raise unknown_scheme(folder, f"{where}.weights", describe(weights), expected)
    if inputs is None:
        return "nvfp4-a16"
    if not is_nvfp4_input(inputs):
        raise unknown_scheme(
            folder, f"{where}.input_activations", describe(inputs), f"null, or {NVFP4_EXPECTED}"
        )
    return "nvfp4"


def _check_attention(folder: str | Path, where: str, group: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a group that quantizes Q, K and V instead of weights."""
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise unknown_scheme(
                folder, f"{where}.{name}", describe(group[name]), "null without weights"
            )


def _check_format(folder: str | Path, where: str, form: str | None, scheme: Scheme) -> None:
    valid = _FP8_FORMATS if scheme == "fp8" else (NVFP4_FORMAT,)
    if form not in (*valid, _MIXED_FORMAT):
        raise unknown_scheme(folder, f"{where}: format", repr(form), " or ".join(map(repr, valid)))


def _check_pattern(folder: str | Path, where: str, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            regex.compile(pattern.removeprefix("re:"))
        except regex.error as error:
            raise unknown_scheme(
                folder, where, f"{pattern!r} ({error})", "a regular expression"
            ) from None


def _refuse_extras(folder: str | Path, section: Mapping[str, Any]) -> None:
    for pattern in patterns(folder, section, "ignore"):
        _check_pattern(folder, "ignore", pattern)
    transforms = _object(folder, section, "transform_config").get("config_groups")
    if transforms:
        names = ", ".join(map(str, transforms))
        raise unknown_scheme(folder, "transform_config", f"transforms {names}", "none")
    sparsity = _object(folder, section, "sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise unknown_scheme(folder, "sparsity_config.format", repr(sparsity), "'dense'")


def _object(folder: str | Path, section: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    found = section.get(where) or {}
    if not isinstance(found, Mapping):
        raise unknown_scheme(folder, where, repr(found), "an object")
    return found
