"""The format of the KV cache that a checkpoint declares, read field by field.

ModelOpt names an algorithm (`kv_cache_quant_algo`), for all layers or for each
(`kv_cache_quantized_layers`); compressed-tensors describes one (`kv_cache_scheme`, the fields of
its `QuantizationArgs`). ModelOpt's copy in `config.json` has either under that name. Quark
describes the outputs of K's and V's projections (`kv_cache_quant_config`), and AutoFP8 says
`static`.
Every field that affects values is honoured or refused: reading a cache in another format than the
declared one would silently change logits.

Not in `checkpoints/dialects/`, which write these fields: they are no dialect's own, and
`KVCacheDType.from_checkpoint` reads them from a configuration alone.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from halfbyte.layouts.formats import KV_FORMATS
from halfbyte.layouts.quantization_args import first_misfit, is_set

FP8, NVFP4 = "fp8_e4m3", "nvfp4"
Formats = tuple[str, str]
"""Names of the formats of K and of V."""

_ALGOS: dict[str, Formats] = {
    **{row.modelopt: (name, name) for name, row in KV_FORMATS.items() if row.modelopt},
    "FP8_K_NVFP4_V": (FP8, NVFP4),
}
_MIXED = "MIXED_PRECISION"
_PREFIX = "kv_cache"
_QUARK = "kv_cache_quant_config"
_NAMES = ("kv_cache_quant_algo", "kv_cache_scheme", _QUARK)
_LAYERS, _VERSION = "kv_cache_quantized_layers", "kv_cache_schema_version"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*\w+$")
_GROUP_SIZE = KV_FORMATS[NVFP4].block_size

_COMMON: dict[str, tuple[object, ...]] = {
    "type": ("float",),
    "symmetric": (True,),
    "actorder": (None, False),
}
_FIELDS: dict[int, dict[str, tuple[object, ...]]] = {
    8: {
        **_COMMON,
        "num_bits": (8,),
        "strategy": (None, "tensor"),
        "group_size": (None,),
        "dynamic": (None, False),
        "scale_dtype": (None, "float32", "bfloat16", "float16"),
    },
    4: {
        **_COMMON,
        "num_bits": (4,),
        "strategy": (None, "tensor_group"),
        "group_size": (None, _GROUP_SIZE),
        "dynamic": (None, False, "local"),
        "scale_dtype": (None, "float8_e4m3fn"),
    },
}
_QUARK_FP8: dict[str, tuple[object, ...]] = {
    "dtype": ("fp8_e4m3",),
    "qscheme": ("per_tensor",),
    "is_dynamic": (False, None),
}
_EXPECTED = (
    "8 bits per tensor (fp8_e4m3) or 4 bits in groups of 16 with E4M3 scales (nvfp4), float, "
    "symmetric, not dynamic"
)


class DeclaredCache(NamedTuple):
    """The declaration of one section of a configuration."""

    formats: Formats | None
    """Formats of K and V if all quantized layers have the same, else None."""
    layers: Mapping[int, Formats] | None
    """Formats by layer, if the section lists layers; others are not quantized."""


def read_declared_cache(section: Mapping[str, Any]) -> DeclaredCache | None:
    """The KV cache declared by a `quantization_config` or by ModelOpt's `quantization`.

    Returns:
        None if it declares none.

    Raises:
        ValueError: a format that is not read here, or two that contradict each other; an unknown
            field of the cache that is set; one line.
    """
    _refuse_unknown(section)
    declared = [
        (key, _declared_by(key, section))
        for key in _NAMES
        if not _is_none(section.get(key)) and (key != _QUARK or is_set(section[key]))
    ]
    for key, formats in declared[1:]:
        if formats != declared[0][1]:
            raise ValueError(
                f"{key}: expected what {declared[0][0]} says ({section[declared[0][0]]!r}), "
                f"found {section[key]!r}"
            )
    layers = _layers(section)
    if not layers:
        if declared and declared[0][1] is None:
            raise ValueError(f"{declared[0][0]}: {_MIXED} is not supported without {_LAYERS}")
        return DeclaredCache(declared[0][1], None) if declared else None
    same = set(layers.values())
    if declared and declared[0][1] is not None and same - {declared[0][1]}:
        raise ValueError(
            f"{_LAYERS}: expected {section[declared[0][0]]} in every layer, as "
            f"{declared[0][0]} says, found others"
        )
    return DeclaredCache(same.pop() if len(same) == 1 else None, layers)


def format_of_scheme(scheme: Mapping[str, Any]) -> str:
    """Name of the format that a `kv_cache_scheme` describes.

    Args:
        scheme: fields of compressed-tensors' `QuantizationArgs`; absent ones have its defaults (an
            absent `num_bits` is 8), but for `type`, which ModelOpt never leaves out either.

    Raises:
        ValueError: a field with a value that is not read here; one line that names it.
    """
    bits = scheme.get("num_bits", 8)
    key = first_misfit(scheme, _FIELDS[4 if bits == 4 else 8])
    if key is not None:
        raise ValueError(
            f"kv_cache_scheme: {key} {scheme.get(key)!r} is not supported; expected {_EXPECTED}"
        )
    if scheme.get("strategy") == "tensor_group" and scheme.get("group_size") is None:
        raise ValueError(
            f"kv_cache_scheme: group_size None with strategy tensor_group is not supported; "
            f"expected {_GROUP_SIZE}"
        )
    return NVFP4 if bits == 4 else FP8


def _refuse_unknown(section: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of the cache that is set and not read here."""
    if "model_type" in section:  # a model's whole configuration, which may have fields of any name
        return
    for name, value in section.items():
        is_known = name in (*_NAMES, _LAYERS, _VERSION) or not str(name).startswith(_PREFIX)
        if not is_known and is_set(value):
            raise ValueError(f"{name}: {value!r} is not supported; expected no such field")
    version = section.get(_VERSION)
    if version not in (None, 1):
        raise ValueError(f"{_VERSION}: {version!r} is not supported; expected 1")


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.upper() == "NONE")


def _declared_by(key: str, section: Mapping[str, Any]) -> Formats | None:
    value = section[key]
    if key == _QUARK:
        return _quark_formats(value)
    if key == "kv_cache_scheme" and value == "static" and section.get("quant_method") == "fp8":
        return (FP8, FP8)  # vLLM's first FP8 caches, written by AutoFP8
    return _formats(key, value)


def _quark_formats(value: object) -> Formats:
    """Formats of Quark's section, which describes the outputs of the K and V projections."""
    layers = value.values() if isinstance(value, Mapping) else ()
    outputs = [one.get("output_tensors") if isinstance(one, Mapping) else None for one in layers]
    for one in outputs:
        fields = one if isinstance(one, Mapping) else {}
        found = {name: fields.get(name) for name in _QUARK_FP8}
        if any(found[name] not in values for name, values in _QUARK_FP8.items()):
            raise ValueError(f"{_QUARK}: {found} is not supported; expected fp8_e4m3 per_tensor")
    if not outputs:
        raise ValueError(f"{_QUARK}: {value!r} is not supported; expected an object of layers")
    return (FP8, FP8)


def _formats(key: str, value: object) -> Formats | None:
    """Formats of K and V; None for `MIXED_PRECISION`."""
    if isinstance(value, Mapping):
        name = format_of_scheme(value)
        return (name, name)
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r} is not supported; expected a name or an object")
    if value.upper() == _MIXED:
        return None
    if value.upper() not in _ALGOS:
        raise ValueError(f"{key}: {value!r} is not supported; expected one of {', '.join(_ALGOS)}")
    return _ALGOS[value.upper()]


def _layers(section: Mapping[str, Any]) -> dict[int, Formats] | None:
    key = _LAYERS
    listed = section.get(key)
    if listed is None:
        return None
    if not isinstance(listed, Mapping):
        raise ValueError(f"{key}: {listed!r} is not supported; expected an object of layers")
    layers: dict[int, Formats] = {}
    for name, layer in listed.items():
        fields = layer if isinstance(layer, Mapping) else {"quant_algo": layer}
        unknown = {x: y for x, y in fields.items() if x != "quant_algo" and y is not None}
        if unknown.pop("group_size", _GROUP_SIZE) != _GROUP_SIZE or unknown:
            raise ValueError(f"{key}: {name}: {dict(fields)} is not supported")
        match = _LAYER.search(name)
        if match is None:
            raise ValueError(
                f"{key}: {name!r} is not supported; expected the names of attention modules, "
                "'model.layers.0.self_attn'"
            )
        algo = fields.get("quant_algo")
        formats = None if _is_none(algo) else _formats(f"{key}: {name}", algo)
        if _is_none(algo):
            continue
        if formats is None or layers.setdefault(int(match[1]), formats) != formats:
            raise ValueError(f"{key}: {name}: {algo!r} is not supported; expected one format")
    return layers
