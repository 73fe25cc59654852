"""NVIDIA ModelOpt: `hf_quant_config.json`, and its copy in `config.json`, read and written.

`hf_quant_config.json` says `{"quantization": {"quant_algo", "exclude_modules", "group_size",
"kv_cache_quant_algo", "quantized_layers"}}`; the copy (ModelOpt's `convert_hf_quant_config_format`)
calls the exclusions `ignore`, and the cache's format `kv_cache_scheme`, which is an object for FP8
and a plain name for other formats. Exclusions are module names or shell wildcards. The copy's
`config_groups` repeat how weights and activations are quantized; if none of them quantizes
activations, `NVFP4` layers without an activation scale are W4A16.

`MIXED_PRECISION` names an algorithm for each layer. FP8 layers are supported beside NVFP4 layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

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
    NVFP4_EXPECTED,
    describe,
    is_fp8_input,
    is_fp8_weight,
    is_nvfp4_input,
    is_nvfp4_weight,
)
from halfbyte.checkpoints.errors import CheckpointError, read_json
from halfbyte.layouts.quantization_args import is_set
from halfbyte.numerics import nvfp4

MODELOPT_FILE = "hf_quant_config.json"
_SCHEMES: dict[str, Scheme] = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4-a16"}
_MIXED_SCHEMES: dict[str, Scheme] = {
    **_SCHEMES,
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_MIXED = "MIXED_PRECISION"
_OF_CACHE = (
    *("kv_cache_quant_algo", "kv_cache_scheme"),
    *("kv_cache_quantized_layers", "kv_cache_schema_version"),
)
_DECLARED = (
    *("quant_algo", "group_size", "quantized_layers", "exclude_modules", "ignore"),
    *_OF_CACHE,
)
_GROUP_SIZE = 16
_GROUP_FIELDS = ("targets", "weights", "input_activations")
_LAYER_FIELDS = ("quant_algo", "group_size", "pre_quant_scale", "has_zero_point", "lora_rank")
_REFUSED = ("pre_quant_scale", "has_zero_point", "lora_rank")
_WITHOUT_EFFECT = (
    *("producer", PROVIDER_KEY, "quant_method", "version"),
    "smoothquant_val",  # TensorRT-LLM's, of algorithms that are not read here
)
_FIELDS = frozenset((*_DECLARED, *_REFUSED, *_WITHOUT_EFFECT, "quantization", "config_groups"))
_WILD = frozenset("*?[")
# Readers of the dialect (vLLM, TensorRT-LLM) require this name; the provider key names the writer.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


class ModelOpt(CheckpointDialect):
    """The dialect of NVIDIA ModelOpt, see above."""

    name = "modelopt"
    tensor_names = TensorNames("weight", "weight_scale", "weight_scale_2", "input_scale", True, ())

    def declares(self, folder: Path, method: str | None) -> bool:
        """See `CheckpointDialect.declares`."""
        return (folder / MODELOPT_FILE).is_file() or str(method).startswith(self.name)

    def read(self, folder: Path, section: Mapping[str, Any]) -> Declaration:
        """See `CheckpointDialect.read`; ModelOpt's own file wins over its copy in the config."""
        file, section = folder / MODELOPT_FILE, _whole_section(folder, section)
        declared = read_modelopt_file(file) if file.is_file() else section
        algo = declared.get("quant_algo")
        whole = {**_undeclared(section), **declared}
        if not declared.keys() & set(_OF_CACHE):  # null says that there is none
            whole |= {name: section[name] for name in _OF_CACHE if name in section}
        _refuse_unknown(folder, whole)
        groups: tuple[LayerGroup, ...] = ()
        if algo == _MIXED:
            groups = tuple(_mixed_groups(folder, declared))
        elif algo is not None:
            groups = (LayerGroup(_scheme(folder, declared, _SCHEMES, "quant_algo"), ("*",)),)
        _check_groups(folder, whole, groups)
        where = "exclude_modules" if "exclude_modules" in declared else "ignore"
        return Declaration(
            self,
            groups=groups,
            ignore=listed_patterns(folder, declared, where),
            kv_cache_dtype=declared_cache(folder, whole),
            leaves_activations=_leaves_activations(whole),
            section=whole,
        )

    def patterns(self, patterns: Iterable[str]) -> LayerPatterns:
        """See `CheckpointDialect.patterns`."""
        return _Patterns(patterns)

    def config_section(self, output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
        """As ModelOpt's `convert_hf_quant_config_format` converts `hf_quant_config.json`."""
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK_SIZE}
        inputs = {"input_activations": dict(args)} if output.quantize_activations else {}
        config: dict[str, Any] = {
            "config_groups": {"group_0": {**inputs, "weights": args, "targets": ["Linear"]}},
            "ignore": list(ignore),
            "quant_algo": _quant_algo(output),
        }
        if output.kv_cache_dtype:
            algo = KV_CACHE_ALGOS[output.kv_cache_dtype]
            fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
            config["kv_cache_scheme"] = fp8 if algo == "FP8" else algo
            config["kv_cache_quant_algo"] = algo
        return {
            **config,
            "producer": dict(_PRODUCER),
            "quant_method": self.name,
            PROVIDER_KEY: PROVIDER,
        }

    def own_files(self, output: OutputFormat, ignore: Sequence[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointDialect.own_files`: `hf_quant_config.json`."""
        fields = {
            "producer": dict(_PRODUCER),
            PROVIDER_KEY: PROVIDER,
            "quantization": {
                "quant_algo": _quant_algo(output),
                "kv_cache_quant_algo": output.kv_cache_dtype
                and KV_CACHE_ALGOS[output.kv_cache_dtype],
                "group_size": nvfp4.BLOCK_SIZE,
                "exclude_modules": list(ignore),
            },
        }
        return {MODELOPT_FILE: fields}

    def kv_scale_name(self, attention: str, side: Literal["k", "v"]) -> str:
        """See `CheckpointDialect.kv_scale_name`."""
        return f"{attention}.{side}_proj.{side}_scale"


def read_modelopt_file(file: Path) -> Mapping[str, Any]:
    """The `quantization` object of ModelOpt's `hf_quant_config.json`.

    Raises:
        CheckpointError: not a JSON object, or without `quantization`; fields beside it that
            contradict it; one line.
    """
    declared = read_json(file)
    if not {"quantization", "quant_algo"} & declared.keys():
        found = ", ".join(declared) or "none of it"
        raise CheckpointError(f"{file}: expected a JSON object with 'quantization', found {found}")
    section = declared.get("quantization", declared)
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{file}: 'quantization': expected an object, found {type(section).__name__}"
        )
    return _whole_section(file, declared)


def _whole_section(where: Path, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization` of an object, with the fields of a declaration that are beside it.

    Raises:
        CheckpointError: a field is in both, with different values.
    """
    nested = declared.get("quantization")
    if not isinstance(nested, Mapping):
        return declared
    for name, value in declared.items():
        if name in nested and nested[name] != value and name not in _WITHOUT_EFFECT:
            raise CheckpointError(
                f"{where}: {name}: expected what 'quantization' has, {nested[name]!r}, found "
                f"{value!r} beside it"
            )
    beside = {name: value for name, value in declared.items() if name != "quantization"}
    return {**beside, **nested}


def _refuse_unknown(folder: Path, section: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field that is set and may change results in unknown ways."""
    for name, value in section.items():
        if name not in _FIELDS and not name.startswith("_") and is_set(value):
            raise unknown_scheme(folder, name, repr(value), "no such field")


class _Patterns:
    """Module names and wildcards, which match a module and all modules inside it.

    Names are in a dict: an MoE model's declaration may list every projection of every expert.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names: dict[str, int] = {}
        self._wildcards: list[tuple[int, str]] = []
        for place, pattern in enumerate(patterns):
            if not _WILD.isdisjoint(pattern):
                self._wildcards.append((place, pattern))
            else:
                self._names.setdefault(pattern, place)

    def place(self, name: str) -> int | None:
        """Index of the first pattern that matches a module or one of its parents."""
        ends = (i for i, letter in enumerate(f"{name}.") if letter == ".")
        places = [self._names[name[:end]] for end in ends if name[:end] in self._names]
        places += [place for place, pattern in self._wildcards if fnmatchcase(name, pattern)][:1]
        return min(places, default=None)


def _undeclared(config_section: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the config's copy other than the declaration, which is read from the original."""
    return {name: value for name, value in config_section.items() if name not in _DECLARED}


def _leaves_activations(section: Mapping[str, Any]) -> bool:
    """Whether there are groups, and all of them quantize weights only."""
    groups = section.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    return bool(groups) and all(
        isinstance(group, Mapping)
        and group.get("weights") is not None
        and group.get("input_activations") is None
        for group in groups
    )


def _check_groups(folder: Path, section: Mapping[str, Any], groups: tuple[LayerGroup, ...]) -> None:
    """Raise CheckpointError if `config_groups` contradict the declared algorithms."""
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


def _mixed_groups(folder: Path, section: Mapping[str, Any]) -> Iterator[LayerGroup]:
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
    folder: Path, section: Mapping[str, Any], schemes: Mapping[str, Scheme], where: str
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


def _quant_algo(output: OutputFormat) -> str:
    return "NVFP4" if output.quantize_activations else "W4A16_NVFP4"
