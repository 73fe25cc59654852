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

Checkpoints that halfbyte writes carry `"provider": "halfbyte"` in `quantization_config`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from halfbyte.files import read_json_object, shortened
from halfbyte.layouts.kv_declarations import read_declared_cache

Dialect = Literal["modelopt", "compressed-tensors"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

Scheme = Literal["nvfp4", "nvfp4-a16", "fp8"]
"""How one layer's weight is stored. `nvfp4` (W4A4) carries an activation scale, `nvfp4-a16` (W4A16)
none. `fp8` (E4M3, one scale per tensor or per row) occurs beside them in mixed precision."""

PROVIDER_KEY = "provider"
PROVIDER = "halfbyte"
MODELOPT_FILE = "hf_quant_config.json"


class CheckpointError(ValueError):
    """A checkpoint is broken or not one that is read here; one line: what, expected, found.

    What is too long for a line is cut in the middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def one_line(error: BaseException) -> str:
    """An error's message without line ends; its class where it says nothing or a name alone."""
    text = shortened(str(error))
    if isinstance(error, KeyError) and " " not in text:
        text = f"unknown name {text}"
    return text or type(error).__name__


def read_json(file: Path) -> dict[str, Any]:
    """As `files.read_json_object`.

    Raises:
        CheckpointError: what it refuses.
    """
    try:
        return read_json_object(file)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


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
class Declaration(ABC):
    """What a checkpoint says of its quantization, in one of the dialects.

    Args:
        groups: layers by how they are stored; empty where only the KV cache is quantized.
        ignore: patterns of layers that are not quantized although a group's targets name them.
        kv_cache_dtype: name of the KV cache format, `mixed` where there are several, or None where
            none is declared.
        leaves_activations: whether `nvfp4` layers without an activation scale are W4A16 after all.
        section: the declaration as the file has it.
    """

    dialect: ClassVar[Dialect]
    """Whose names and patterns it uses."""

    groups: tuple[LayerGroup, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None
    leaves_activations: bool = False
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

    @abstractmethod
    def scheme_of(self, module_name: str) -> Scheme | None:
        """How a linear layer's weight is stored; None if it is not quantized.

        Args:
            module_name: as the files have it, for example
                `model.layers.0.mlp.experts.3.gate_proj`.
        """


def declared_cache(folder: str | Path, section: Mapping[str, Any]) -> str | None:
    """`Declaration.kv_cache_dtype` of a section.

    Raises:
        CheckpointError: a format that is not read here.
    """
    try:
        declared = read_declared_cache(section)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if declared is None:
        return None
    names = set(declared.formats or ("mixed",))
    return names.pop() if len(names) == 1 else "mixed"


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
