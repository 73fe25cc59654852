"""Global scales of K and V, per layer, and where they came from.

Kept as the largest magnitude (amax) that each layer's K and V may have, because every format
derives its own global scale from it: `amax / 2688` for nvfp4, `amax / 448` for fp8, and so on.
A global scale read from a checkpoint is converted to its amax in float64, which is exact, and the
conversion back is bit-exact for the format that it was made for.

Scales are fixed before the first request. They never come from live requests: results must not
depend on the order of requests or on how a prompt was split into chunks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from halfbyte.files import read_json_object, replace_file, shortened
from halfbyte.kvcache.calibration import KVCalibration
from halfbyte.kvcache.calibration_file import (
    check_sibling,
    load_calibration,
    remove_calibration,
    sibling_of,
)
from halfbyte.kvcache.recipe import KVRecipe

KV_SCALES_FILE = "kv_scales.json"
"""File of a model's scales in its folder, next to the calibration of recipes."""
_FORMAT = "halfbyte-kv-scales-1"
NO_SCALE = float("nan")
"""The amax of a layer without a scale, whose cache is not quantized with one."""
_SHAPE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class ScaledFormat(Protocol):
    """The part of a cache format that scales need; every `KVCacheQuantMethod` has it."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    def global_scale_from_amax(self, amax: float) -> float:
        """Global scale for tensors whose largest magnitude is `amax`, linear in it."""
        ...


@dataclass(frozen=True)
class KVScales:
    """amax of K and of V per layer.

    Args:
        k_amax, v_amax: one finite number above 0 per layer, or `NO_SCALE`. A layer of zeros is
            rejected: its scale is unknown.
        source: where they came from, for the log ("checkpoint", "user", "calibration on …").
        calibration: data for recipes other than `plain`; None if not measured.
        shape: of the model that they were measured on, see `shape_of_model`; empty if not known.

    Raises:
        ValueError: different lengths, or a number that is 0, negative or not finite.
    """

    k_amax: tuple[float, ...]
    v_amax: tuple[float, ...]
    source: str
    calibration: KVCalibration | None = None
    shape: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if len(self.k_amax) != len(self.v_amax):
            raise ValueError(f"KV scales: {len(self.k_amax)} layers of K, {len(self.v_amax)} of V")
        for name in ("k_amax", "v_amax"):
            for layer, amax in enumerate(getattr(self, name)):
                if amax is not NO_SCALE and not (math.isfinite(amax) and amax > 0):
                    raise ValueError(
                        f"KV scales from {self.source}: {name} of layer {layer} is {amax}, "
                        "expected a finite number above 0"
                    )
        if self.calibration and len(self.calibration.layers) != len(self.k_amax):
            raise ValueError(
                f"KV scales from {self.source}: {len(self.k_amax)} layers, and a calibration of "
                f"{len(self.calibration.layers)}"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.k_amax)

    def amax_of_layer(self, layer: int) -> tuple[float, float]:
        """`(k_amax, v_amax)` of a layer.

        Raises:
            ValueError: the layer has none.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(
                f"KV scales from {self.source}: no layer {layer}, only {self.num_layers}"
            )
        if self.k_amax[layer] is NO_SCALE or self.v_amax[layer] is NO_SCALE:
            raise ValueError(f"KV scales from {self.source}: layer {layer} has none")
        return self.k_amax[layer], self.v_amax[layer]

    def suits(self, recipe: KVRecipe) -> bool:
        """Whether all that a recipe needs was measured."""
        if not recipe.changes_k:
            return True
        if self.calibration is None:
            return False
        return not recipe.weighs_errors or self.calibration.has_costs

    def calibration_for(self, recipe: KVRecipe) -> KVCalibration:
        """What a recipe that changes K needs.

        Raises:
            ValueError: these scales have none, or an older one that does not suit the recipe.
        """
        if self.calibration is None:
            raise ValueError(
                f"kv_recipe {recipe.name}: needs a calibration of K, and the scales from "
                f"{self.source} have none; `halfbyte calibrate` measures it"
            )
        if not self.suits(recipe):
            raise ValueError(
                f"kv_recipe {recipe.name}: needs a calibration of queries and outputs, and that of "
                f"the scales from {self.source} is older; `halfbyte calibrate` measures it anew"
            )
        return self.calibration

    def check_heads(self, layer: int, num_kv_heads: int, head_size: int, ranks: int = 1) -> None:
        """Check that a layer's calibration has the KV heads that the model has.

        Args:
            num_kv_heads: of each of the `ranks` that share them; with fewer heads than ranks, one.
            head_size: of K.

        Raises:
            ValueError: it is another model's, or has no such layer.
        """
        self.amax_of_layer(layer)
        found = self.calibration
        if found is None or found.has_heads(layer, num_kv_heads, head_size, ranks):
            return
        total, size = found.layers[layer].mean.shape
        own = f"{num_kv_heads} of {head_size}" + (" per rank" if ranks > 1 else "")
        raise ValueError(
            f"KV scales from {self.source}: layer {layer} has a calibration for {total} KV heads "
            f"of {size}, the model has {own}; `halfbyte calibrate` measures its own"
        )

    @classmethod
    def from_global_scales(
        cls,
        k_scales: Sequence[float],
        v_scales: Sequence[float],
        k_method: ScaledFormat,
        v_method: ScaledFormat | None = None,
        source: str = "user",
    ) -> KVScales:
        """From global scales of given formats (decode, float32 values, one per layer).

        Raises:
            ValueError: a scale that is not a positive finite number.
        """
        sides = (
            ("k_scale", k_scales, k_method),
            ("v_scale", v_scales, v_method or k_method),
        )
        amax: list[tuple[float, ...]] = []
        for name, values, method in sides:
            for layer, value in enumerate(values):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(
                        f"KV scales from {source}: {name} of layer {layer} is {value}, "
                        "expected a positive finite number"
                    )
            # global_scale_from_amax is linear with a short integer divisor, so this is exact.
            divisor = round(1.0 / method.global_scale_from_amax(1.0))
            amax.append(tuple(float(value) * divisor for value in values))
        return cls(amax[0], amax[1], source)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        method: ScaledFormat,
        v_method: ScaledFormat | None = None,
    ) -> KVScales:
        """From the `k_scale` and `v_scale` (global scales) of a model's attention modules.

        Attention modules are those with a `layer_idx` and a K projection or a scale; the scales are
        attributes of the module, of its `attn` child, or `k_proj.k_scale` and `v_proj.v_scale`.

        Raises:
            ValueError: no attention module, or one without scales.
        """
        found: dict[int, tuple[float, float]] = {}
        for name, module in model.named_modules():
            layer = getattr(module, "layer_idx", None)
            if not isinstance(layer, int):
                continue
            k = _find_scale(module, "k_scale", "k_proj", name)
            v = _find_scale(module, "v_scale", "v_proj", name)
            if k is None and v is None and not hasattr(module, "k_proj"):
                continue
            if k is None or v is None:
                raise ValueError(f"{name}: no k_scale and v_scale for a {method.name} cache")
            found[layer] = (k, v)
        if not found:
            raise ValueError("model: no attention module with layer_idx, k_scale and v_scale")
        return cls.from_layers(found, method, v_method, source="model")

    @classmethod
    def from_layers(
        cls,
        scales: dict[int, tuple[float, float]],
        method: ScaledFormat,
        v_method: ScaledFormat | None = None,
        *,
        source: str,
    ) -> KVScales:
        """From `{layer: (k_scale, v_scale)}`.

        Raises:
            ValueError: a layer between 0 and the last one is missing.
        """
        missing = sorted(set(range(max(scales) + 1)) - set(scales))
        if missing:
            raise ValueError(f"KV scales from {source}: layers {missing} have none")
        ordered = [scales[layer] for layer in range(len(scales))]
        return cls.from_global_scales(
            [k for k, _ in ordered], [v for _, v in ordered], method, v_method, source=source
        )

    def save(self, folder: str | Path) -> Path:
        """Write `kv_scales.json` into a model's folder, see `save_file`; returns its path."""
        return self.save_file(Path(folder) / KV_SCALES_FILE)

    def save_file(self, path: str | Path) -> Path:
        """Write a file of scales atomically; returns its path.

        A calibration is written first, to a file beside it (`calibration_file.sibling_of`). Scales
        without one remove an earlier calibration there.

        Raises:
            OSError: its folder is absent or cannot be written; `path` is a device, pipe or folder.
            ValueError: another file has the name of the calibration's; a layer has no scale.
        """
        path = Path(path)
        if path.exists() and not path.is_file():  # as root, the rename replaces /dev/null
            raise FileExistsError(errno.EEXIST, "is no regular file", str(path))
        for layer in range(self.num_layers):
            self.amax_of_layer(layer)
        fields = {
            "format": _FORMAT,
            "source": self.source,
            "k_amax": list(self.k_amax),
            "v_amax": list(self.v_amax),
            "model": dict(self.shape),
        }
        if self.calibration is not None:
            data = self.calibration.to_bytes()
            check_sibling(path)
            replace_file(sibling_of(path), data)
            fields["calibration"] = hashlib.sha256(data).hexdigest()
        replace_file(path, (json.dumps(fields, indent=2) + "\n").encode())
        if self.calibration is None:
            remove_calibration(path)
        return path

    @classmethod
    def load(cls, folder: str | Path) -> KVScales | None:
        """Read `kv_scales.json` of a model's folder; None if there is none.

        Raises:
            ValueError: the file is not what `save` writes.
        """
        path = Path(folder) / KV_SCALES_FILE
        return cls.load_file(path) if path.is_file() else None

    @classmethod
    def load_file(cls, path: str | Path) -> KVScales:
        """Read a file of scales.

        Raises:
            ValueError: it is absent, or not what `save_file` writes; one line that names it.
        """
        fields = read_json_object(Path(path))
        try:
            if fields["format"] != _FORMAT:
                raise ValueError(f"format is {fields['format']!r}, expected {_FORMAT!r}")
            amax = [fields[name] for name in ("k_amax", "v_amax")]
            if not all(isinstance(values, list) for values in amax):
                raise ValueError("k_amax and v_amax are not lists")
            k_amax, v_amax = (tuple(map(_number, values)) for values in amax)
            calibration = load_calibration(Path(path), fields.get("calibration"))
            source = fields["source"]
            if not isinstance(source, str) or source != shortened(source):
                raise ValueError("source is not a line of text")
            return cls(k_amax, v_amax, source, calibration, dict(fields.get("model", {})))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(shortened(f"{path}: not a file of KV scales: {error}")) from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected numbers, found {value!r}")
    return float(value)


def shape_of_model(config: object) -> dict[str, object]:
    """Fingerprint of a model's family and size; fine-tunes have the same.

    Args:
        config: of transformers, or the mapping of a `config.json`; absent fields are left out.
    """
    fields = config if isinstance(config, Mapping) else vars(config)
    text = fields.get("text_config")
    if text is not None:
        fields = text if isinstance(text, Mapping) else vars(text)
    named = {name: fields.get(name) for name in _SHAPE}
    if named["model_type"] is None:  # some configs have it as an attribute of the class
        named["model_type"] = getattr(config, "model_type", None)
    return {name: value for name, value in named.items() if isinstance(value, int | str)}


def _find_scale(module: nn.Module, name: str, projection: str, path: str) -> float | None:
    for owner in (module, getattr(module, "attn", None), getattr(module, projection, None)):
        value = getattr(owner, name, None)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{path}.{name}: expected one element, got {tuple(value.shape)}")
            return float(value.detach())
        if value is not None:
            return float(value)
    return None
