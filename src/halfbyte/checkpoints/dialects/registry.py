"""Registry of dialects, and reading of a checkpoint's declaration in any of them.

The declaration is `quantization_config` of `config.json`; ModelOpt also writes
`hf_quant_config.json`, the original of the two, which wins if both exist.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from halfbyte.checkpoints.dialects.base import (
    CheckpointDialect,
    Declaration,
    Dialect,
    TensorNames,
    unknown_scheme,
)
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.dialects.modelopt import ModelOpt
from halfbyte.checkpoints.errors import CheckpointError, read_json

DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
"""Names of all supported dialects."""
_REGISTRY: dict[Dialect, CheckpointDialect] = {
    dialect.name: dialect
    # ModelOpt last: its file may exist beside another method's section, which wins.
    for dialect in (CompressedTensors(), ModelOpt())
}
TENSOR_NAMES: dict[Dialect, TensorNames] = {name: _REGISTRY[name].tensor_names for name in DIALECTS}
"""Tensor names of NVFP4 layers in each dialect."""


def get_dialect(name: Dialect) -> CheckpointDialect:
    """The dialect with a name."""
    return _REGISTRY[name]


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`.

    Raises:
        CheckpointError: it or its `quantization_config` is not a JSON object; one line.
    """
    config = read_json(folder / "config.json")
    _section(folder, config)
    return config


def read_declaration(folder: str | Path, config: Mapping[str, Any]) -> Declaration | None:
    """Read a checkpoint's declaration of its quantization.

    Args:
        folder: of the checkpoint.
        config: the dict of its `config.json`.

    Returns:
        None for a checkpoint that is not quantized, or by a method of neither dialect (left to
        transformers).

    Raises:
        CheckpointError: a broken declaration; an unsupported scheme of these dialects, or Quark's
            NVFP4; one line that names the scheme.
    """
    folder = Path(folder)
    section = _section(folder, config)
    method = section.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise CheckpointError(f"{folder}: quant_method: expected a name, found {method!r}")
    if method == "quark":
        _refuse_quark(folder, section)
        return None
    declaring = (dialect for dialect in _REGISTRY.values() if dialect.declares(folder, method))
    dialect = next(declaring, None)
    return None if dialect is None else dialect.read(folder, section)


def _section(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config` of the config, empty if absent."""
    for name in ("quantization", "quantization_config"):
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(
                f"{folder}: {name}: expected an object, found {type(section).__name__}"
            )
    return config.get("quantization_config") or {}


def _refuse_quark(folder: Path, section: Mapping[str, Any]) -> None:
    """Raise CheckpointError for Quark's 4-bit floats; transformers loads its other formats."""
    # Layers and layer classes may have formats other than the global one.
    parts = [value for name, value in section.items() if name.endswith("quant_config") and value]
    if "fp4" in json.dumps(parts or section).lower():
        raise unknown_scheme(
            folder,
            "quantization_config.quant_method",
            "'quark' with FP4 weights (AMD Quark's NVFP4 and MXFP4 are not read)",
            "'modelopt' or 'compressed-tensors'",
        )
