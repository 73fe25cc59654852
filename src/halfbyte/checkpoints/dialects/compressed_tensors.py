"""compressed-tensors: `quantization_config` of `config.json`, read and written.

`config_groups` give a scheme to the modules that `targets` name: exact names, `re:` patterns
(matched from the start of the name) or the class `Linear`, in this order of precedence. As in the
package, the alphabetically first of several matching patterns wins, and the last of groups with the
same target. `ignore` takes the same kinds. A group may be a preset's name with its targets. Packed
NVFP4 layers have the format `nvfp4-pack-quantized`, declared for the whole file or for a group, and
MXFP4 layers `mxfp4-pack-quantized`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import regex

from halfbyte.checkpoints.dialects.base import (
    KV_CACHE_ALGOS,
    PROVIDER,
    PROVIDER_KEY,
    CheckpointDialect,
    Declaration,
    LayerGroup,
    LayerPatterns,
    OutputFormat,
    Scheme,
    TensorNames,
    declared_cache,
    listed_patterns,
    unknown_scheme,
)
from halfbyte.checkpoints.dialects.schemes import (
    FP8_EXPECTED,
    MXFP4_EXPECTED,
    NVFP4_EXPECTED,
    describe,
    is_fp8_input,
    is_fp8_weight,
    is_mxfp4_input,
    is_mxfp4_weight,
    is_nvfp4_input,
    is_nvfp4_weight,
)
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.dispatch import is_installed
from halfbyte.layouts.quantization_args import is_set
from halfbyte.numerics import nvfp4

NVFP4_FORMAT = "nvfp4-pack-quantized"
_MXFP4_FORMAT = "mxfp4-pack-quantized"
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_MIXED_FORMAT = "mixed-precision"
_OTHER_FORMATS = (
    *_FP8_FORMATS,
    "int-quantized",
    "marlin-24",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "pack-quantized",
)
_UNPACKED_FORMATS = ("dense", "fakequant")
_FORMATS = (NVFP4_FORMAT, _MXFP4_FORMAT, _MIXED_FORMAT, *_OTHER_FORMATS, *_UNPACKED_FORMATS)
_PRESETS: dict[str, Scheme] = {
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4-a16",
    "MXFP4": "mxfp4",
    "MXFP4A16": "mxfp4",
}
_SECONDS = 2
"""Max seconds to match a pattern with a name: some patterns backtrack exponentially."""
_WITHOUT_EFFECT = (
    *("quant_method", "version", PROVIDER_KEY, "quantization_status", "global_compression_ratio"),
    *("run_compressed", "dequantize"),
)
_FIELDS = (
    *("config_groups", "format", "ignore", "transform_config", "sparsity_config"),
    *_WITHOUT_EFFECT,
)
_GROUP_FIELDS = ("targets", "weights", "input_activations", "format")
_WRITTEN_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": nvfp4.BLOCK_SIZE,
    "strategy": "tensor_group",
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
# "local": block scales are computed at run time, the global scale is in the file.
_WRITTEN_INPUTS = {**_WRITTEN_WEIGHTS, "dynamic": "local", "observer": "static_minmax"}
_WRITTEN_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
    "observer": "static_minmax",
}


class CompressedTensors(CheckpointDialect):
    """The dialect compressed-tensors, see above."""

    name = "compressed-tensors"
    tensor_names = TensorNames(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", False, (1,)
    )

    def declares(self, folder: Path, method: str | None) -> bool:
        """See `CheckpointDialect.declares`."""
        return method == self.name

    def read(self, folder: Path, section: Mapping[str, Any]) -> Declaration | None:
        """See `CheckpointDialect.read`.

        Returns:
            None if no layer is NVFP4 or MXFP4, and the package compressed-tensors is installed,
            with which transformers reads the other formats.
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
        return Declaration(
            self,
            groups=tuple(_groups(folder, form, groups)) if packed else (),
            ignore=listed_patterns(folder, section, "ignore"),
            kv_cache_dtype=kv_cache_dtype,
            section=section,
        )

    def patterns(self, patterns: Iterable[str]) -> LayerPatterns:
        """See `CheckpointDialect.patterns`."""
        return _Patterns(patterns)

    def config_section(self, output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
        """As the package's `QuantizationConfig` serializes its presets NVFP4 and NVFP4A16."""
        inputs = _WRITTEN_INPUTS if output.quantize_activations else None
        # vLLM rejects a `kv_cache_scheme` of 4 bits, and the package cannot store such a cache. So
        # write ModelOpt's name for the format instead, which both ignore.
        is_nvfp4 = output.kv_cache_dtype == "nvfp4"
        return {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": dict(_WRITTEN_WEIGHTS),
                    "input_activations": inputs and dict(inputs),
                    "output_activations": None,
                    "format": NVFP4_FORMAT,
                }
            },
            "quant_method": self.name,
            "kv_cache_scheme": dict(_WRITTEN_FP8_CACHE)
            if output.kv_cache_dtype == "fp8_e4m3"
            else None,
            **({"kv_cache_quant_algo": KV_CACHE_ALGOS["nvfp4"]} if is_nvfp4 else {}),
            "format": NVFP4_FORMAT,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": list(ignore),
            PROVIDER_KEY: PROVIDER,
        }

    def kv_scale_name(self, attention: str, side: Literal["k", "v"]) -> str:
        """See `CheckpointDialect.kv_scale_name`."""
        return f"{attention}.{side}_scale"


class _Patterns:
    """Names of linear layers, regular expressions, and the class `Linear`, in this precedence.

    The last of equal patterns wins. Names are in a dict: an MoE model's declaration may list every
    projection of every expert.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._places = {pattern: place for place, pattern in enumerate(patterns)}
        self._expressions = {
            pattern: regex.compile(pattern.removeprefix("re:"))
            for pattern in sorted(self._places)
            if pattern.startswith("re:")
        }

    def place(self, name: str) -> int | None:
        """See `LayerPatterns.place`."""
        if name in self._places:
            return self._places[name]
        for pattern, expression in self._expressions.items():
            try:
                if expression.match(name, timeout=_SECONDS):
                    return self._places[pattern]
            except TimeoutError:
                raise CheckpointError(
                    f"{pattern!r}: expected a pattern that can be matched, found one that takes "
                    f"more than {_SECONDS} s for {name}"
                ) from None
        return self._places.get("Linear")


def _groups(folder: Path, form: str | None, groups: Mapping[str, Any]) -> Iterator[LayerGroup]:
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


def _scheme(folder: Path, where: str, group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    for name, value in group.items():
        if name not in _GROUP_FIELDS and value not in (None, False):
            raise unknown_scheme(folder, f"{where}.{name}", describe(value), "null")
    if is_fp8_weight(weights) and (inputs is None or is_fp8_input(inputs)):
        return "fp8"
    if is_mxfp4_weight(weights) and (
        inputs is None or is_mxfp4_input(inputs) or is_fp8_input(inputs)
    ):
        return "mxfp4"
    if not is_nvfp4_weight(weights):
        expected = f"{NVFP4_EXPECTED}, {MXFP4_EXPECTED}, or {FP8_EXPECTED}"
        raise unknown_scheme(folder, f"{where}.weights", describe(weights), expected)
    if inputs is None:
        return "nvfp4-a16"
    if not is_nvfp4_input(inputs):
        raise unknown_scheme(
            folder, f"{where}.input_activations", describe(inputs), f"null, or {NVFP4_EXPECTED}"
        )
    return "nvfp4"


def _check_attention(folder: Path, where: str, group: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a group that quantizes Q, K and V instead of weights."""
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise unknown_scheme(
                folder, f"{where}.{name}", describe(group[name]), "null without weights"
            )


def _check_format(folder: Path, where: str, form: str | None, scheme: Scheme) -> None:
    own = {"fp8": _FP8_FORMATS, "mxfp4": (_MXFP4_FORMAT,)}
    valid = own.get(scheme, (NVFP4_FORMAT,))
    if form not in (*valid, _MIXED_FORMAT):
        raise unknown_scheme(folder, f"{where}: format", repr(form), " or ".join(map(repr, valid)))


def _check_pattern(folder: Path, where: str, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            regex.compile(pattern.removeprefix("re:"))
        except regex.error as error:
            raise unknown_scheme(
                folder, where, f"{pattern!r} ({error})", "a regular expression"
            ) from None


def _refuse_extras(folder: Path, section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        if name not in _FIELDS and not name.startswith(("_", "kv_cache_")) and is_set(value):
            raise unknown_scheme(folder, name, repr(value), "no such field")
    for pattern in listed_patterns(folder, section, "ignore"):
        _check_pattern(folder, "ignore", pattern)
    transforms = _object(folder, section, "transform_config").get("config_groups")
    if transforms:
        names = ", ".join(map(str, transforms))
        raise unknown_scheme(folder, "transform_config", f"transforms {names}", "none")
    sparsity = _object(folder, section, "sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise unknown_scheme(folder, "sparsity_config.format", repr(sparsity), "'dense'")


def _object(folder: Path, section: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    found = section.get(where) or {}
    if not isinstance(found, Mapping):
        raise unknown_scheme(folder, where, repr(found), "an object")
    return found
