"""The two dialects of NVFP4 checkpoints: what their tensors are called and what they declare.

Both store, per quantized linear layer, E2M1 codes two to a byte (the even input feature in the low
nibble), one E4M3 scale per 16 input features, and float32 global scales. They differ in names and
in the direction of the global scales:

| | ModelOpt | compressed-tensors |
|---|---|---|
| codes, uint8 `[N, K/2]` | `weight` | `weight_packed` |
| block scales, float8_e4m3fn `[N, K/16]` | `weight_scale` | `weight_scale` |
| global scale of the weight | `weight_scale_2`, decode | `weight_global_scale`, encode |
| global scale of the activations | `input_scale`, decode | `input_global_scale`, encode |

*Decode* multiplies codes on their way to values (amax / 2688), *encode* is its reciprocal. W4A16
layers (`nvfp4-a16`) have no activation scale.

What is quantized, and how, stands in `quantization_config` of `config.json`; ModelOpt also writes
`hf_quant_config.json`, which wins where both exist because it is the original of the two.
Checkpoints that halfbyte writes carry `"provider": "halfbyte"` in `quantization_config`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Dialect = Literal["modelopt", "compressed-tensors"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

Scheme = Literal["nvfp4", "nvfp4-a16", "fp8"]
"""How one layer's weight is stored. `nvfp4` (W4A4) carries an activation scale, `nvfp4-a16` (W4A16)
none. `fp8` (E4M3, one scale per tensor or per row) occurs beside them in mixed precision."""

PROVIDER_KEY = "provider"
PROVIDER = "halfbyte"
MODELOPT_FILE = "hf_quant_config.json"


class CheckpointError(ValueError):
    """A checkpoint is broken or not one that is read here; one line: what, expected, found."""


def one_line(error: BaseException) -> str:
    """An error's message without line ends; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class TensorNames:
    """Names of a quantized layer's tensors, after the layer's own name and a dot.

    Args:
        weight: codes.
        weight_scale: block scales.
        weight_global_scale: global scale of the weight.
        input_global_scale: global scale of the activations (W4A4).
        global_scale_is_decode: whether the file's global scales multiply (ModelOpt) or divide.
    """

    weight: str
    weight_scale: str
    weight_global_scale: str
    input_global_scale: str
    global_scale_is_decode: bool


TENSOR_NAMES: dict[Dialect, TensorNames] = {
    "modelopt": TensorNames("weight", "weight_scale", "weight_scale_2", "input_scale", True),
    "compressed-tensors": TensorNames(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", False
    ),
}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are stored the same way.

    Args:
        scheme: how.
        targets: which: names, patterns of the dialect, or the class name `Linear`.
    """

    scheme: Scheme
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint says of its quantization.

    Args:
        dialect: whose names and patterns it uses.
        groups: layers by how they are stored; empty where only the KV cache is quantized.
        ignore: patterns of layers that are not quantized although a group's targets name them.
        kv_cache_dtype: name of the KV cache format, or None where none is declared.
        section: the declaration as the file has it.
    """

    dialect: Dialect
    groups: tuple[LayerGroup, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None
    section: Mapping[str, Any] | None = None

    @property
    def quantize_activations(self) -> bool:
        """Whether any layer is declared W4A4."""
        return any(group.scheme == "nvfp4" for group in self.groups)

    @property
    def is_ours(self) -> bool:
        """Whether halfbyte wrote the checkpoint."""
        return (self.section or {}).get(PROVIDER_KEY) == PROVIDER

    @property
    def names(self) -> TensorNames:
        """Names of the tensors of its NVFP4 layers."""
        return TENSOR_NAMES[self.dialect]

    def scheme_of(self, module_name: str) -> Scheme | None:
        """How a linear layer's weight is stored; None if it is not quantized.

        Args:
            module_name: as the files have it, for example
                `model.layers.0.mlp.experts.3.gate_proj`.
        """
        if self.dialect == "modelopt":
            from halfbyte.checkpoints.modelopt import scheme_of
        else:
            from halfbyte.checkpoints.compressed_tensors import scheme_of
        return scheme_of(self, module_name)


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`.

    Raises:
        CheckpointError: it is no JSON object, or its `quantization_config` is none; one line.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected JSON, found {one_line(error)}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected an object, found {type(config).__name__}")
    _section(folder, config)
    return config


def read_declaration(folder: str | Path, config: Mapping[str, Any]) -> Declaration | None:
    """What a checkpoint declares of its quantization.

    Args:
        folder: of the checkpoint.
        config: the dict of its `config.json`.

    Returns:
        None for a checkpoint that is not quantized, or by a method of neither dialect (which is
        transformers' business).

    Raises:
        CheckpointError: a broken declaration; or one of these dialects, or of Quark's NVFP4, that
            is not read here: one line that names the scheme.
    """
    from halfbyte.checkpoints import compressed_tensors, modelopt

    section = _section(folder, config)
    method = section.get("quant_method")
    if method == "compressed-tensors":
        return compressed_tensors.read(folder, section)
    if method == "quark":
        _refuse_quark(folder, section)
        return None
    file = Path(folder) / MODELOPT_FILE
    if file.is_file():
        return modelopt.read(folder, _read_modelopt_file(file), section)
    if str(method).startswith("modelopt"):
        return modelopt.read(folder, section, section)
    return None


def unknown_scheme(folder: str | Path, where: str, found: object, expected: str) -> CheckpointError:
    """The error for a declaration that nothing here reads."""
    return CheckpointError(f"{folder}: {where}: expected {expected}, found {found}")


def patterns(folder: str | Path, section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A list of names of modules, or none.

    Raises:
        CheckpointError: something else; a string would be taken for a list of its letters.
    """
    found = section.get(where) or ()
    if not isinstance(found, (list, tuple)):
        raise CheckpointError(f"{folder}: {where}: expected a list, found {found!r}")
    return tuple(str(pattern) for pattern in found)


def _section(folder: str | Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config` of the config, empty where it has none."""
    section = config.get("quantization_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{folder}: quantization_config: expected an object, found {type(section).__name__}"
        )
    return section


def _read_modelopt_file(file: Path) -> Mapping[str, Any]:
    try:
        section = json.loads(file.read_text())["quantization"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: expected a JSON object with 'quantization', found {one_line(error)}"
        ) from None
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{file}: 'quantization': expected an object, found {type(section).__name__}"
        )
    return section


def _refuse_quark(folder: str | Path, section: Mapping[str, Any]) -> None:
    """Refuse Quark's 4-bit floats by name; its other formats are left to transformers."""
    # Per layer and per class of layers there may be other formats than the global one.
    parts = [value for name, value in section.items() if name.endswith("quant_config") and value]
    if "fp4" in json.dumps(parts or section).lower():
        raise unknown_scheme(
            folder,
            "quantization_config.quant_method",
            "'quark' with FP4 weights (AMD Quark's NVFP4 and MXFP4 are not read)",
            "'modelopt' or 'compressed-tensors'",
        )
