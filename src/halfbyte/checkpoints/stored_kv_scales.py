"""Reads K and V scales from a checkpoint's safetensors files; `kv_scale_names` has their names.

All scales have one element. Encode scales (`k_global_scale`) are inverted. Only headers are read
until a name matches. ModelOpt's affine caches add `…k_proj.k_bias` and `…v_proj.v_bias`; their
scales apply to K and V minus the bias. They are rejected, because they declare a plain FP8 or NVFP4
cache.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from halfbyte.checkpoints.errors import CheckpointError, one_line
from halfbyte.checkpoints.index import INDEX_FILE, SINGLE_FILE, read_weight_map
from halfbyte.checkpoints.kv_scale_names import (
    is_kv_offset,
    is_of_layers,
    looks_like_kv_scale,
    parse_kv_scale,
)

logger = logging.getLogger("halfbyte")

_ANY = (2.0**-13, 2.0**12)
"""Range of a plausible amax of K or V in a layer. It allows for scales of amax / 2688 that are read
as FP8 scales (amax / 448), which gives a sixth of the amax."""
_USUAL = (2.0**-9, 2.0**10)
"""Plausible median amax of all layers. An encode scale (448 / amax) under a decode name implies
448 * 448 / amax, which is above this range if amax is below 196."""


class StoredKVScale(NamedTuple):
    """A scale of K or V."""

    value: float
    """Decode: multiplies stored values."""
    name: str
    """Name of its tensor."""
    is_of_nvfp4: bool
    """amax / 2688, whatever format is declared; else by the declared format."""


LayerScales = tuple[StoredKVScale, StoredKVScale]
"""Scales of K and of V."""


@dataclass(frozen=True)
class StoredKVScales:
    """All scales of a checkpoint.

    Args:
        folder: of the checkpoint.
        by_layer: of the model, and of drafts that are stored as further layers.
        unknown: the first tensor that looks like a scale of the model's K or V by a name whose
            meaning is not known; None if there is none.
    """

    folder: Path
    by_layer: Mapping[int, LayerScales] = field(default_factory=dict)
    unknown: str | None = None

    def refusal(self) -> CheckpointError:
        """The error for `unknown`."""
        unexported = "; ModelOpt's export (`export_hf_checkpoint`) writes such names"
        return CheckpointError(
            f"{self.folder}: {self.unknown}: expected the scales of a language model's layers "
            "under a known name, such as model.layers.0.self_attn.k_scale (decode: amax / 448 for "
            f"FP8){unexported if '_quantizer.' in str(self.unknown) else ''}; rename it, or "
            "measure scales with `halfbyte calibrate`, or give kv_scales"
        )


def is_kv_scale(name: str) -> bool:
    """Whether this is the name of a layer's K or V scale, in any dialect or an unknown one."""
    return parse_kv_scale(name) is not None or (looks_like_kv_scale(name) and is_of_layers(name))


def read_kv_scales(folder: str | Path) -> dict[int, tuple[float, float]]:
    """`{layer: (k_scale, v_scale)}` of a checkpoint's folder; empty if it stores none.

    Encode scales (`k_global_scale`) are converted to decode scales. If a layer has both kinds, the
    decode scale is used. Scales of drafts and towers are not the model's.

    Raises:
        CheckpointError: as `read_stored_scales`; a scale under an unknown name.
    """
    stored = read_stored_scales(folder)
    if stored.unknown is not None:
        raise stored.refusal()
    return {layer: (k.value, v.value) for layer, (k, v) in stored.by_layer.items()}


def read_stored_scales(folder: str | Path) -> StoredKVScales:
    """The scales of a checkpoint's folder, with their names.

    Read are the files that transformers would load, and those that an index leaves out. Scales that
    hardly any model can have are logged with a warning.

    Raises:
        CheckpointError: a file is absent or broken; a scale is not where the index says, has more
            than one element, is an integer, occurs twice, or is not a finite number above 0; a
            layer has only one of the two scales; there are biases or zero points.
    """
    folder = Path(folder)
    by_kind: tuple[_Sides, _Sides] = ({}, {})
    unknown: dict[bool, str] = {}
    files, indexed = _files_with_scales(folder)
    missing = set(indexed)
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder}: expected the shard {file.name}, found no such file")
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                place = indexed.get(name, file)
                if place != file:
                    continue  # a copy that the index does not name
                missing.discard(name)
                if is_kv_offset(name):
                    _check_offset(f"{folder}: {name}", tensors.get_tensor(name))
                elif parse_kv_scale(name) is not None:
                    _add(by_kind, file, name, tensors.get_tensor(name))
                elif looks_like_kv_scale(name):
                    unknown.setdefault(is_of_layers(name), name)
    for name in sorted(missing):
        raise CheckpointError(
            f"{folder}: {name}: expected in {indexed[name].name}, as {INDEX_FILE} says, found no "
            "such tensor there"
        )
    layers = _merged(folder, by_kind)
    _warn_of_unlikely(folder, layers)
    refused = unknown.get(True) or (None if layers else unknown.get(False))
    return StoredKVScales(folder, layers, refused)


_Sides = dict[int, dict[str, StoredKVScale]]
"""Scales by layer and side (`k`, `v`)."""


def _add(by_kind: tuple[_Sides, _Sides], file: Path, name: str, tensor: torch.Tensor) -> None:
    parsed = parse_kv_scale(name)
    assert parsed is not None
    sides = by_kind[parsed.is_global].setdefault(parsed.layer, {})
    scale = _decode_scale(f"{file}: {name}", tensor, parsed.is_global)
    for side in parsed.sides:
        other = sides.setdefault(side, StoredKVScale(scale, name, parsed.is_global))
        if other.value != scale:
            raise CheckpointError(
                f"{file.parent}: {name}: expected one {side}_scale in the layer, "
                f"found {scale} and {other.value}"
            )


def _merged(folder: Path, by_kind: tuple[_Sides, _Sides]) -> dict[int, LayerScales]:
    """Scales by layer; where both kinds are stored, the decode scales."""
    decode, encode = by_kind
    layers: dict[int, LayerScales] = {}
    for layer in sorted({*decode, *encode}):
        sides = {**encode.get(layer, {}), **decode.get(layer, {})}
        if len(sides) != 2:
            raise CheckpointError(
                f"{folder}: layer {layer} has a {'/'.join(sides)}_scale only; give a file of "
                "`halfbyte calibrate --out FILE` as kv_scales"
            )
        layers[layer] = (sides["k"], sides["v"])
    return layers


def _warn_of_unlikely(folder: Path, layers: Mapping[int, LayerScales]) -> None:
    """Warn of implausible scales: of one layer, or the median of all; once for K and once for V."""
    for side in range(2):
        scales = [pair[side] for pair in layers.values()]
        ordered = sorted(scales, key=_represented)
        checked = [
            (ordered[:1] + ordered[-1:], _ANY),
            ([*ordered[len(ordered) // 2 :][:1]], _USUAL),
        ]
        for some, (smallest, largest) in checked:
            odd = next((x for x in some if not smallest <= _represented(x) <= largest), None)
            if odd is None:
                continue
            _warn_of(folder, odd, "KV"[side])
            break


@lru_cache(maxsize=256)
def _warn_of(folder: Path, odd: StoredKVScale, side: str) -> None:
    """Warn once of a scale, however often its folder is read."""
    own, other = ("an encode", "a decode") if odd.is_of_nvfp4 else ("a decode", "an encode")
    logger.warning(
        "%s: %s: its name means %s scale, so that |%s| is at most %g; is it %s scale "
        "(the reciprocal), or in another unit?",
        *(folder, odd.name, own, side, _represented(odd), other),
    )


def _represented(scale: StoredKVScale) -> float:
    """The amax that a scale implies; as an FP8 scale if its format is not certain."""
    return scale.value * (2688 if scale.is_of_nvfp4 else 448)


def _check_offset(name: str, offset: torch.Tensor) -> None:
    if bool((offset != 0).any()):
        raise CheckpointError(
            f"{name}: expected K and V scales alone, found the offset of an affine KV cache, which "
            "is not read here"
        )


def _decode_scale(name: str, scale: torch.Tensor, is_encode: bool) -> float:
    if scale.numel() != 1:
        raise CheckpointError(f"{name}: expected one element, found {list(scale.shape)}")
    if not scale.is_floating_point():  # bytes may be exponents
        dtype = str(scale.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: expected a floating-point number, found {dtype}")
    value = float(scale)
    if not 0 < value < math.inf:
        raise CheckpointError(f"{name}: expected a finite number above 0, found {value}")
    return 1 / value if is_encode else value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        reason = one_line(error)
        raise CheckpointError(f"{file}: not a readable safetensors file: {reason}") from None


def _files_with_scales(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to open; and the file of each scale by the index.

    All files of the folder, but not those of an index that transformers ignores.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    files = set(folder.glob("*.safetensors"))
    if not index.is_file():
        return sorted(files), {}
    try:
        weight_map = {name: folder / file for name, file in read_weight_map(folder).items()}
    except CheckpointError:
        if not single.is_file():
            raise
        weight_map = {}
    if single.is_file() and single not in weight_map.values():
        # transformers reads this file and ignores the index
        return sorted(files - set(weight_map.values())), {}
    indexed = {
        name: file for name, file in weight_map.items() if is_kv_scale(name) or is_kv_offset(name)
    }
    return sorted(files | set(indexed.values())), indexed
