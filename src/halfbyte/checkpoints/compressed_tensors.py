"""compressed-tensors' declarations: `quantization_config` of `config.json`.

`config_groups` give a scheme to the modules that `targets` name: exact names, `re:` patterns
(matched from the start of the name) or the class `Linear`; the most specific match wins in this
order. As in the package, of several patterns the first in the alphabet does, and of groups with the
same target the last.
`ignore` takes the same kinds. A group may be a preset's name with its targets. Packed NVFP4 layers
have the format `nvfp4-pack-quantized`, of the whole file or of a group.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.dialects import (
    CheckpointError,
    Declaration,
    LayerGroup,
    Scheme,
    patterns,
    unknown_scheme,
)
from halfbyte.dispatch import is_installed
from halfbyte.layouts import KVCacheDType

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
_GROUP_SIZE = 16


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
            pattern: re.compile(pattern.removeprefix("re:"))
            for pattern in sorted(self._names)
            if pattern.startswith("re:")
        }

    def best(self, name: str) -> str | None:
        """The pattern that says most exactly that a linear layer is meant, None if none does."""
        if name in self._names:
            return name
        for pattern, expression in self._expressions.items():
            if expression.match(name):
                return pattern
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
    groups = section.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(
            f"{folder}: config_groups: expected an object, found {type(groups).__name__}"
        )
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
        kv_cache_dtype=_kv_cache_dtype(folder, section),
        section=section,
    )


def _groups(
    folder: str | Path, form: str | None, groups: Mapping[str, Any]
) -> Iterator[LayerGroup]:
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if isinstance(group, Mapping):
            if group.get("weights") is None:
                continue  # of an attention module: how its cache is quantized
            scheme = _scheme(folder, where, group)
            _check_format(folder, where, group.get("format") or form, scheme)
            targets = group.get("targets")
        elif name.upper() in _PRESETS:
            scheme, targets = _PRESETS[name.upper()], group
        else:
            expected = f"an object or one of {', '.join(_PRESETS)}"
            raise unknown_scheme(folder, "config_groups", repr(name), expected)
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise unknown_scheme(folder, f"{where}.targets", targets, "a list of names")
        for target in targets:
            _check_pattern(folder, where, target)
        yield LayerGroup(scheme, tuple(targets))


def _scheme(folder: str | Path, where: str, group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    if group.get("output_activations") is not None:
        raise unknown_scheme(folder, f"{where}.output_activations", "a scheme", "null")
    if _is_fp8(weights) and (inputs is None or _is_fp8(inputs)):
        return "fp8"
    if not _is_nvfp4(weights) or weights.get("dynamic"):
        raise unknown_scheme(folder, f"{where}.weights", _text(weights), f"{_EXPECTED}, or {_FP8}")
    if inputs is None:
        return "nvfp4-a16"
    if not _is_nvfp4(inputs) or inputs.get("dynamic") is True:
        raise unknown_scheme(
            folder, f"{where}.input_activations", _text(inputs), f"null, or {_EXPECTED}"
        )
    return "nvfp4"


_EXPECTED = "NVFP4 (float, num_bits 4, group_size 16, symmetric, not dynamic)"
_FP8 = "FP8 per tensor or row"
_ORDERS = (None, False, "static", "weight")
"""Of columns by how much they matter, that leave the tensors' as it was: nothing but GPTQ's own
order of work. Others come with a `weight_g_idx`."""


def _is_nvfp4(args: Any) -> bool:
    return (
        isinstance(args, Mapping)
        and args.get("type", "int") == "float"
        and args.get("num_bits") == 4
        and args.get("group_size") == _GROUP_SIZE
        and args.get("strategy") in (None, "tensor_group")
        and args.get("symmetric", True) is True
        and args.get("actorder") in _ORDERS
        and args.get("scale_dtype") in (None, "torch.float8_e4m3fn", "float8_e4m3fn")
    )


def _is_fp8(args: Any) -> bool:
    return (
        isinstance(args, Mapping)
        and args.get("type") == "float"
        and args.get("num_bits") == 8
        and args.get("strategy") in ("tensor", "channel", "token")
        and args.get("symmetric", True) is True
    )


def _text(args: Any) -> str:
    if not isinstance(args, Mapping):
        return repr(args)
    keys = (
        *("type", "num_bits", "strategy", "group_size", "dynamic", "symmetric"),
        *("actorder", "scale_dtype"),
    )
    return ", ".join(f"{key} {args[key]}" for key in keys if args.get(key) is not None)


def _check_format(folder: str | Path, where: str, form: str | None, scheme: Scheme) -> None:
    valid = _FP8_FORMATS if scheme == "fp8" else (NVFP4_FORMAT,)
    if form not in (*valid, _MIXED_FORMAT):
        raise unknown_scheme(folder, f"{where}: format", repr(form), " or ".join(map(repr, valid)))


def _check_pattern(folder: str | Path, where: str, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise unknown_scheme(
                folder, where, f"{pattern!r} ({error})", "a regular expression"
            ) from None


def _refuse_extras(folder: str | Path, section: Mapping[str, Any]) -> None:
    for pattern in patterns(folder, section, "ignore"):
        _check_pattern(folder, "ignore", pattern)
    transforms = section.get("transform_config") or {}
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        names = ", ".join(transforms["config_groups"])
        raise unknown_scheme(folder, "transform_config", f"transforms {names}", "none")
    sparsity = section.get("sparsity_config") or {}
    if sparsity and sparsity.get("format") not in (None, "dense"):
        raise unknown_scheme(folder, "sparsity_config.format", sparsity["format"], "'dense'")


def _kv_cache_dtype(folder: str | Path, section: Mapping[str, Any]) -> str | None:
    try:
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        declared = KVCacheDType.from_checkpoint({key: section.get(key) for key in keys})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return declared.value if declared.is_quantized else None
