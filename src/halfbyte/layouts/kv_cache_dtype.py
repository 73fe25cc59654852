"""KV cache formats by name, from users and from checkpoints."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch

from halfbyte.layouts.arguments import finite_number
from halfbyte.layouts.formats import KV_FORMATS, KVFormat
from halfbyte.layouts.kv_declarations import DeclaredCache, read_declared_cache

_ALIASES = {"fp8": "fp8_e4m3", "fp4_e2m1": "nvfp4"}


class KVCacheDType(StrEnum):
    """Format of the values of a KV cache.

    `AUTO` stands for "what the checkpoint declares, else the model's dtype" and must be resolved
    before bytes are laid out. `float32` completes the unquantized ones for models that run in it.
    Every row of `KV_FORMATS` is a member; those that code here names are listed for type checkers.
    """

    _ignore_ = "_members _name"

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"
    FP4_BLOCK16 = "fp4_block16"
    MXFP4 = "mxfp4"
    _members = vars()
    for _name in KV_FORMATS:
        if _name.upper() not in _members:
            _members[_name.upper()] = _name

    @classmethod
    def parse(cls, name: str | KVCacheDType | torch.dtype) -> KVCacheDType:
        """The dtype of a name or alias (`fp8` = `fp8_e4m3`, `fp4_e2m1` = `nvfp4`).

        Raises:
            ValueError: unknown name; the message lists the valid ones.
        """
        if isinstance(name, torch.dtype):
            name = str(name).removeprefix("torch.")
        try:
            return cls(_ALIASES.get(name, name))
        except (ValueError, TypeError):  # TypeError: not hashable
            valid = ", ".join([member.value for member in cls] + list(_ALIASES))
            raise ValueError(f"KV cache dtype: unknown {name!r}; expected one of {valid}") from None

    @classmethod
    def from_checkpoint(cls, config: Any) -> KVCacheDType:
        """The cache format that a checkpoint's configuration declares.

        Args:
            config: a transformers config, the dict of a `config.json`, the dict of a ModelOpt
                `hf_quant_config.json`, or a bare `quantization_config`. Read are ModelOpt's
                `kv_cache_quant_algo` and `kv_cache_quantized_layers`, and `kv_cache_scheme` of
                ModelOpt and compressed-tensors.

        Returns:
            The declared format (of the layers that are quantized at all), else the model's dtype
            (`dtype` or `torch_dtype`), else `AUTO`.

        Raises:
            ValueError: the checkpoint declares a format that halfbyte does not have, or several,
                which `layers_from_checkpoint` tells apart.
        """
        declared = declared_cache_of(config)
        if declared is None:
            return cls._unquantized(config)
        if declared.formats is None or len(set(declared.formats)) > 1:
            raise ValueError("KV cache: layers, or K and V, are declared in different formats")
        return cls(declared.formats[0])

    @classmethod
    def layers_from_checkpoint(
        cls, config: Any, num_layers: int
    ) -> list[tuple[KVCacheDType, KVCacheDType]]:
        """The formats of K and of V of each layer, as `from_checkpoint` reads them.

        Args:
            config: as for `from_checkpoint`.
            num_layers: of the model.

        Raises:
            ValueError: a format that halfbyte does not have, or one for a layer that the model does
                not have.
        """
        declared = declared_cache_of(config)
        plain = cls._unquantized(config)
        if declared is None:
            return [(plain, plain)] * num_layers
        if declared.layers is None:
            assert declared.formats is not None
            k, v = map(cls, declared.formats)
            return [(k, v)] * num_layers
        unknown = sorted(layer for layer in declared.layers if layer >= num_layers)
        if unknown:
            raise ValueError(
                f"kv_cache_quantized_layers: has layer {unknown[0]}, the model has {num_layers}"
            )
        names = (declared.layers.get(layer, (plain, plain)) for layer in range(num_layers))
        return [(cls(k), cls(v)) for k, v in names]

    @classmethod
    def _unquantized(cls, config: Any) -> KVCacheDType:
        fields = _as_mapping(config)
        for section in (fields, _section(fields, "text_config")):
            for key in ("dtype", "torch_dtype"):
                if section.get(key) is not None:
                    return cls.parse(section[key])
        return cls.AUTO

    def resolve(self, model_dtype: torch.dtype) -> KVCacheDType:
        """Itself, or for `AUTO` the format of the model's dtype."""
        return KVCacheDType.parse(model_dtype) if self is KVCacheDType.AUTO else self

    @classmethod
    def where(cls, condition: Callable[[KVFormat], object]) -> tuple[KVCacheDType, ...]:
        """The formats whose row fulfils a condition, in the order of the table."""
        return tuple(cls(name) for name, row in KV_FORMATS.items() if condition(row))

    @property
    def kv_format(self) -> KVFormat:
        """The format's row in the table.

        Raises:
            ValueError: `AUTO`, which has no bytes until it is resolved, or a member without a row.
        """
        if self is KVCacheDType.AUTO:
            raise ValueError("KV cache dtype 'auto' must be resolved before it is stored")
        if self.value not in KV_FORMATS:
            raise ValueError(f"KV cache dtype {self.value!r} has no row in `KV_FORMATS`")
        return KV_FORMATS[self.value]

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored in fewer bits than a model computes in."""
        return self is not KVCacheDType.AUTO and self.kv_format.is_quantized

    @property
    def is_nvfp4(self) -> bool:
        """Whether the bits are NVFP4, however block scales are chosen."""
        return self is not KVCacheDType.AUTO and self.kv_format.nvfp4_recipe is not None

    @property
    def has_global_scale(self) -> bool:
        """Whether dequantization multiplies by a per-tensor float32 scale."""
        return self is not KVCacheDType.AUTO and self.kv_format.has_global_scale

    @property
    def scale_block_size(self) -> int | None:
        """Values that share one block scale, or None where there are no block scales."""
        return None if self is KVCacheDType.AUTO else self.kv_format.block_size

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the stored elements: uint8 for quantized formats, else the float dtype itself.

        Raises:
            ValueError: as `kv_format`.
        """
        return self.kv_format.storage_dtype

    def data_bytes(self, head_size: int) -> int:
        """Bytes of one head of one token, without block scales."""
        return head_size * self.kv_format.bits // 8

    def scale_bytes(self, head_size: int) -> int:
        """Bytes of the block scales of one head of one token."""
        if self is KVCacheDType.AUTO:
            return 0
        row = self.kv_format
        if row.block_size is None or row.scale_dtype is None:
            return 0
        return head_size // row.block_size * row.scale_dtype.itemsize

    def check_head_size(self, head_size: int, name: str = "head_size") -> None:
        """Raise ValueError unless heads of this size can be stored."""
        multiple = self.scale_block_size or 1
        if head_size <= 0 or head_size % multiple:
            raise ValueError(
                f"{name}: {self} needs a positive multiple of {multiple}, got {head_size}"
            )

    def check_scale(self, scale: float | torch.Tensor, name: str) -> float | torch.Tensor:
        """A global scale as given, a number rounded to float32; 1 for formats without one.

        The value of a tensor is not checked, because that would sync a GPU
        (`check_scale_on_host`).

        Raises:
            ValueError: a tensor that is not float32 or has several elements, or a number that is
                not positive and finite in float32.
        """
        if not self.has_global_scale:
            return 1.0
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1:
                raise ValueError(f"{name}: expected one element, got {tuple(scale.shape)}")
            if scale.dtype != torch.float32:
                raise ValueError(f"{name}: expected float32, got {scale.dtype}")
            return scale
        expected = "a positive finite number in float32"
        rounded = ctypes.c_float(finite_number(name, scale, expected)).value
        if not 0 < rounded < math.inf:
            raise ValueError(f"{name}: expected {expected}, got {scale!r}")
        return rounded

    def check_scale_on_host(self, scale: float | torch.Tensor, name: str) -> float | torch.Tensor:
        """As `check_scale`; raises ValueError for the value of a tensor on the host, too."""
        checked = self.check_scale(scale, name)
        if isinstance(checked, torch.Tensor) and checked.device.type == "cpu":
            self.check_scale(float(checked), name)
        return checked


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    for method in ("to_dict", "model_dump"):
        if hasattr(config, method):
            fields = getattr(config, method)()
            # transformers leaves the dtype out of to_dict() when it was never set in the file.
            if getattr(config, "dtype", None) is not None:
                fields = {**fields, "dtype": config.dtype}
            return fields
    raise TypeError(f"config: expected a mapping or a transformers config, got {type(config)}")


def declared_cache_of(config: Any) -> DeclaredCache | None:
    """The declaration of the cache, which several sections may repeat.

    Args:
        config: as for `KVCacheDType.from_checkpoint`.

    Returns:
        None if there is none.

    Raises:
        ValueError: two that differ; a format that is not read here.
    """
    read = map(read_declared_cache, _quantization_sections(_as_mapping(config)))
    found = [declared for declared in read if declared is not None]
    for other in found[1:]:
        if other != found[0]:
            raise ValueError(
                "KV cache: expected one declaration, found two that differ: "
                f"{_described(found[0])} and {_described(other)}"
            )
    return found[0] if found else None


def _described(declared: DeclaredCache) -> str:
    if declared.formats is None or declared.layers is not None:
        return "formats by layer"
    return " and ".join(dict.fromkeys(declared.formats))


def _quantization_sections(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where a KV cache format may be declared, most specific first."""
    sections = [_section(fields, "quantization_config"), fields]
    text_config = _section(fields, "text_config")
    sections.append(_section(text_config, "quantization_config"))
    # Older versions of compressed-tensors; vLLM reads it as well.
    older = _section(fields, "compression_config")
    sections += [older, _section(older, "quantization_config")]
    # hf_quant_config.json nests everything under "quantization".
    return sections + [_section(section, "quantization") for section in sections]


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    try:
        return _as_mapping(fields.get(name))
    except TypeError:
        raise ValueError(f"{name}: expected an object, found {fields[name]!r}") from None
