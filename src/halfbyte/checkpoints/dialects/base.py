"""Interface of NVFP4 checkpoint dialects: tensor names, and declarations of the quantization.

All dialects store, per quantized linear layer, E2M1 codes two to a byte (the even input feature in
the low nibble), one E4M3 scale per 16 input features, and float32 global scales. They differ in
tensor names and in the direction of the global scales:

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
from halfbyte.layouts.formats import KV_FORMATS
from halfbyte.layouts.kv_declarations import read_declared_cache
from halfbyte.numerics import nvfp4

Dialect = Literal["modelopt", "compressed-tensors"]
"""Name of a dialect of NVFP4 checkpoints."""

Scheme = Literal["nvfp4", "nvfp4-a16", "fp8", "mxfp4"]
"""How one layer's weight is stored. `nvfp4` (W4A4) carries an activation scale, `nvfp4-a16` (W4A16)
none. `fp8` (E4M3, one scale per tensor or per row) occurs beside them in mixed precision. `mxfp4`
is compressed-tensors': the codes as above, one E8M0 scale per 32 input features, and no other."""

PROVIDER_KEY = "provider"
PROVIDER = "halfbyte"
KV_CACHE_ALGOS = {
    name: row.modelopt
    for name, row in sorted(KV_FORMATS.items(), key=lambda item: item[1].bits)
    if row.modelopt is not None
}
"""KV cache formats that a written checkpoint can declare, with ModelOpt's names; smallest first."""


@dataclass(frozen=True)
class TensorNames:
    """Names (after the layer's name and a dot) and conventions of a quantized layer's tensors.

    Args:
        weight: codes.
        weight_scale: block scales.
        weight_global_scale: global scale of the weight.
        input_global_scale: global scale of the activations (W4A4).
        global_scale_is_decode: whether global scales in the file are multiplied (ModelOpt) or
            divided by.
        scale_shape: of a global scale, and of a K or V scale.
    """

    weight: str
    weight_scale: str
    weight_global_scale: str
    input_global_scale: str
    global_scale_is_decode: bool
    scale_shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputFormat:
    """Options for writing a checkpoint.

    Args:
        dialect: names, directions and declarations.
        quantize_activations: W4A4, which needs the activations' amax; else W4A16.
        recipe: choice of block scales.
        kv_cache_dtype: format that the checkpoint declares for the KV cache, a key of
            `KV_CACHE_ALGOS`, or None.
    """

    dialect: Dialect
    quantize_activations: bool
    recipe: nvfp4.Recipe = "amax6"
    kv_cache_dtype: str | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether anything written needs a calibration run."""
        return self.quantize_activations or self.kv_cache_dtype is not None


class LayerPatterns(Protocol):
    """A list of layer names and patterns, with a dialect's matching rules."""

    def place(self, name: str) -> int | None:
        """Index of the pattern that applies to a linear layer; None if none matches."""


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
        """Read a checkpoint's declaration.

        Args:
            folder: of the checkpoint.
            section: `quantization_config` of `config.json`; empty if there is none.

        Returns:
            None if the checkpoint is left to transformers.

        Raises:
            CheckpointError: a broken declaration, or a scheme that is not read here.
        """

    @abstractmethod
    def patterns(self, patterns: Iterable[str]) -> LayerPatterns:
        """Compile patterns for repeated lookups."""

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
    """Layers with the same scheme.

    Args:
        scheme: how they are stored.
        targets: their names, or patterns of the dialect.
    """

    scheme: Scheme
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Declaration:
    """A checkpoint's declaration of its quantization.

    Args:
        rules: its dialect.
        groups: layers by scheme; empty if only the KV cache is quantized.
        ignore: patterns of layers that are not quantized although a group's targets match them.
        kv_cache_dtype: name of the KV cache format, `mixed` for several, or None if none is
            declared.
        leaves_activations: whether `nvfp4` layers without an activation scale are W4A16.
        section: the declaration as in the file.
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
        """Whether any layer is declared quantized; else only the KV cache is."""
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
            module_name: as in the files, for example
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
        """One per target."""
        return [group.scheme for group in self.groups for _ in group.targets]


def declared_cache(folder: Path, section: Mapping[str, Any]) -> str | None:
    """`Declaration.kv_cache_dtype` of a section.

    Raises:
        CheckpointError: an unsupported format.
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
    """The error for an unsupported declaration."""
    return CheckpointError(f"{folder}: {where}: expected {expected}, found {found}")


def listed_patterns(folder: Path, section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A list of module names, empty if absent.

    Raises:
        CheckpointError: not a list; a string would be read as a list of its letters.
    """
    found = section.get(where) or ()
    if not isinstance(found, (list, tuple)):
        raise CheckpointError(f"{folder}: {where}: expected a list, found {found!r}")
    return tuple(str(pattern) for pattern in found)
