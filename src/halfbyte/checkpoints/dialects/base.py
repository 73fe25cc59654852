"""A dialect of NVFP4 checkpoints: what tensors are called, and how a quantization is declared.

All store, per quantized linear layer, E2M1 codes two to a byte (the even input feature in the low
nibble), one E4M3 scale per 16 input features, and float32 global scales. They differ in names and
in the direction of the global scales:

| | ModelOpt | compressed-tensors |
|---|---|---|
| codes, uint8 `[N, K/2]` | `weight` | `weight_packed` |
| block scales, float8_e4m3fn `[N, K/16]` | `weight_scale` | `weight_scale` |
| global scale of the weight | `weight_scale_2`, decode | `weight_global_scale`, encode |
| global scale of the activations | `input_scale`, decode | `input_global_scale`, encode |

*Decode* scales turn codes into values (amax / 2688), *encode* scales are their reciprocals. W4A16
layers (`nvfp4-a16`) have no activation scale.

Checkpoints that halfbyte writes carry `"provider": "halfbyte"` in `quantization_config`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.layouts.kv_declarations import read_declared_cache
from halfbyte.numerics import nvfp4

Dialect = Literal["modelopt", "compressed-tensors"]
"""Names of the dialects."""

Scheme = Literal["nvfp4", "nvfp4-a16", "fp8"]
"""How one layer's weight is stored. `nvfp4` (W4A4) carries an activation scale, `nvfp4-a16` (W4A16)
none. `fp8` (E4M3, one scale per tensor or per row) occurs beside them in mixed precision."""

PROVIDER_KEY = "provider"
PROVIDER = "halfbyte"
KV_CACHE_ALGOS = {"nvfp4": "NVFP4", "fp8_e4m3": "FP8"}
"""Formats of the KV cache that a checkpoint can be written for, and ModelOpt's names for them."""


@dataclass(frozen=True)
class TensorNames:
    """A quantized layer's tensors: their names, after the layer's own and a dot, and their forms.

    Args:
        weight: codes.
        weight_scale: block scales.
        weight_global_scale: global scale of the weight.
        input_global_scale: global scale of the activations (W4A4).
        global_scale_is_decode: whether the file's global scales multiply (ModelOpt) or divide.
        scale_shape: of a global scale, and of a scale of K or V.
    """

    weight: str
    weight_scale: str
    weight_global_scale: str
    input_global_scale: str
    global_scale_is_decode: bool
    scale_shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputFormat:
    """How a checkpoint is to be written.

    Args:
        dialect: names, directions and declarations.
        quantize_activations: W4A4, which needs the activations' amax; else W4A16.
        recipe: how block scales are chosen.
        kv_cache_dtype: format that the checkpoint declares for the KV cache, a key of
            `KV_CACHE_ALGOS`, or None.
    """

    dialect: Dialect
    quantize_activations: bool
    recipe: nvfp4.Recipe = "amax6"
    kv_cache_dtype: str | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether anything is written that only a run of the model can tell."""
        return self.quantize_activations or self.kv_cache_dtype is not None


class LayerPatterns(Protocol):
    """A list of names and patterns of layers, as a dialect understands it."""

    def place(self, name: str) -> int | None:
        """Place in the list of the pattern that decides about a linear layer; None if none does."""


class CheckpointDialect(ABC):
    """Reads and writes the declarations of one dialect."""

    name: ClassVar[Dialect]
    tensor_names: ClassVar[TensorNames]

    @abstractmethod
    def declares(self, folder: Path, method: str | None) -> bool:
        """Whether a checkpoint is declared in this dialect.

        Args:
            folder: of the checkpoint.
            method: `quant_method` of its `quantization_config`.
        """

    @abstractmethod
    def read(self, folder: Path, section: Mapping[str, Any]) -> "Declaration | None":
        """What a checkpoint declares.

        Args:
            folder: of the checkpoint.
            section: `quantization_config` of `config.json`; empty where there is none.

        Returns:
            None if all of it is left to transformers.

        Raises:
            CheckpointError: a broken declaration, or a scheme that is not read here.
        """

    @abstractmethod
    def patterns(self, patterns: Iterable[str]) -> LayerPatterns:
        """Ready to be asked for many layers."""

    @abstractmethod
    def config_section(self, output: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of `config.json`.

        Args:
            output: what was written.
            ignore: names of the linear layers that are not quantized.
        """

    def own_files(self, output: OutputFormat, ignore: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Contents of JSON files beside `config.json`, by name; arguments of `config_section`."""
        return {}

    @abstractmethod
    def kv_scale_name(self, attention: str, side: Literal["k", "v"]) -> str:
        """Name of the tensor with a layer's K or V scale, a decode scale in both dialects.

        Args:
            attention: name of the attention module.
            side: which of the two.
        """


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are stored the same way.

    Args:
        scheme: how.
        targets: which: names, or patterns of the dialect.
    """

    scheme: Scheme
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint says of its quantization.

    Args:
        rules: of the dialect whose names and patterns it uses.
        groups: layers by how they are stored; empty where only the KV cache is quantized.
        ignore: patterns of layers that are not quantized although a group's targets name them.
        kv_cache_dtype: name of the KV cache format, `mixed` where there are several, or None where
            none is declared.
        leaves_activations: whether `nvfp4` layers without an activation scale are W4A16 after all.
        section: the declaration as the file has it.
    """

    rules: CheckpointDialect
    groups: tuple[LayerGroup, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None
    leaves_activations: bool = False
    section: Mapping[str, Any] | None = None

    @property
    def dialect(self) -> Dialect:
        """Name of the dialect."""
        return self.rules.name

    @property
    def names(self) -> TensorNames:
        """Names of the tensors of its NVFP4 layers."""
        return self.rules.tensor_names

    @property
    def quantizes_weights(self) -> bool:
        """Whether any layer is declared quantized; else the KV cache is, alone."""
        return bool(self.groups)

    @property
    def quantize_activations(self) -> bool:
        """Whether any layer is declared W4A4."""
        return any(group.scheme == "nvfp4" for group in self.groups)

    @property
    def is_ours(self) -> bool:
        """Whether halfbyte wrote the checkpoint."""
        return (self.section or {}).get(PROVIDER_KEY) == PROVIDER

    def scheme_of(self, module_name: str) -> Scheme | None:
        """How a linear layer's weight is stored; None if it is not quantized.

        Args:
            module_name: as the files have it, for example
                `model.layers.0.mlp.experts.3.gate_proj`.
        """
        if self._ignored.place(module_name) is not None:
            return None
        place = self._targets.place(module_name)
        return None if place is None else self._schemes[place]

    @cached_property
    def _ignored(self) -> LayerPatterns:
        return self.rules.patterns(self.ignore)

    @cached_property
    def _targets(self) -> LayerPatterns:
        return self.rules.patterns(target for group in self.groups for target in group.targets)

    @cached_property
    def _schemes(self) -> list[Scheme]:
        """Of every target."""
        return [group.scheme for group in self.groups for _ in group.targets]


def declared_cache(folder: Path, section: Mapping[str, Any]) -> str | None:
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


def unknown_scheme(folder: Path, where: str, found: object, expected: str) -> CheckpointError:
    """The error for a declaration that nothing here reads."""
    return CheckpointError(f"{folder}: {where}: expected {expected}, found {found}")


def listed_patterns(folder: Path, section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A list of names of modules, or none.

    Raises:
        CheckpointError: something else; a string would be taken for a list of its letters.
    """
    found = section.get(where) or ()
    if not isinstance(found, (list, tuple)):
        raise CheckpointError(f"{folder}: {where}: expected a list, found {found!r}")
    return tuple(str(pattern) for pattern in found)
