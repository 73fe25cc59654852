"""K and V scales inside a checkpoint's safetensors files.

ModelOpt writes `…self_attn.k_proj.k_scale` and `…v_proj.v_scale`, compressed-tensors and vLLM
`…self_attn.k_scale` and `…self_attn.v_scale` (older files `…attn.k_scale`, `…k_proj.output_scale`
and `…v_proj.output_scale`, or one `…attn.kv_scale` for both). All are decode scales with one
element. For NVFP4 caches, whose block scales are computed at run time, the package
compressed-tensors has `…self_attn.k_global_scale` and `…v_global_scale`, encode scales
(2688 / amax); halfbyte writes both kinds. Only headers are read until a name matches.

ModelOpt's affine caches add `…k_proj.k_bias` and `…v_proj.v_bias`; their scales apply to K and V
minus the bias. They are rejected, because they declare a plain FP8 or NVFP4 cache.
"""

import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from halfbyte.checkpoints.errors import CheckpointError, one_line
from halfbyte.checkpoints.index import INDEX_FILE, SINGLE_FILE, read_weight_map

# Names are matched whole: the files may also have drafts, and vision and audio towers, whose layers
# have scales of their own.
_OF_MODEL = r"(?:(?:model|language_model|text_model|base_model|transformer|decoder|module)\.)*"
_OF_ATTENTION = r"(?:(?:self_attn|self_attention|attention|attn|kv_cache)\.)*"
_LAYER = rf"^{_OF_MODEL}layers\.(?P<layer>\d+)\.{_OF_ATTENTION}"
_SCALE = (
    r"(?:(?:[kv]_proj\.)?(?P<side>[kv])_(?P<is_encode>global_)?scale|"
    r"(?P<projection>[kv])_proj\.output_scale|(?P<both>kv)_scale)$"
)
_SCALE_NAME = re.compile(_LAYER + _SCALE)
_BIAS_NAME = re.compile(_LAYER + r"(?:[kv]_proj\.)?[kv]_(?:bias|zero_point)$")
_OTHER_MODELS = re.compile(
    r"(?:^|[._])(?:mtp|eagle|draft|speculator|medusa|nextn|vision|visual|audio|encoder)"
)
_ANY_SCALE = re.compile(r"layers\.\d+\.(?:\w+\.)*" + _SCALE)


def is_kv_scale(name: str) -> bool:
    """Whether this is the name of a layer's K or V scale, in any dialect."""
    return _SCALE_NAME.search(name) is not None


def read_kv_scales(folder: str | Path) -> dict[int, tuple[float, float]]:
    """`{layer: (k_scale, v_scale)}` of a checkpoint's folder; empty if it stores none.

    Encode scales (`k_global_scale`) are converted to decode scales. If a layer has both kinds, the
    decode scale is used. Scales of drafts and towers are not the model's.

    Raises:
        CheckpointError: a file is absent or broken; a scale has more than one element, occurs
            twice, or is not a finite number above 0; a layer has only one of the two scales; all
            scales are of unknown modules; or there are biases or zero points.
    """
    found: dict[int, dict[str, float]] = {}
    unknown: list[str] = []
    encoded: dict[int, dict[str, float]] = {}
    for file in _files_with_scales(Path(folder)):
        if not file.is_file():
            raise CheckpointError(f"{folder}: expected the shard {file.name}, found no such file")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if _BIAS_NAME.search(name):
                        raise CheckpointError(
                            f"{folder}: {name}: expected K and V scales alone, found the offset "
                            "of an affine KV cache, which is not read here"
                        )
                    match = _SCALE_NAME.search(name)
                    if match is None:
                        if _ANY_SCALE.search(name) and not _OTHER_MODELS.search(name):
                            unknown.append(name)
                        continue
                    kind = encoded if match["is_encode"] else found
                    sides = kind.setdefault(int(match["layer"]), {})
                    scale = _decode_scale(
                        f"{file}: {name}", tensors.get_tensor(name), bool(match["is_encode"])
                    )
                    for side in match["side"] or match["projection"] or match["both"]:
                        other = sides.setdefault(side, scale)
                        if other != scale:
                            raise CheckpointError(
                                f"{folder}: {name}: expected one {side}_scale in the layer, "
                                f"found {scale} and {other}"
                            )
        except SafetensorError as error:
            reason = one_line(error)
            raise CheckpointError(f"{file}: not a readable safetensors file: {reason}") from None
    if unknown and not found and not encoded:
        raise CheckpointError(
            f"{folder}: {unknown[0]}: expected the scales of a language model's layers, such as "
            "model.layers.0.self_attn.k_scale"
        )
    for layer, sides in encoded.items():
        found[layer] = {**sides, **found.get(layer, {})}
    for layer, sides in found.items():
        if len(sides) != 2:
            raise CheckpointError(f"{folder}: layer {layer} has a {'/'.join(sides)}_scale only")
    return {layer: (sides["k"], sides["v"]) for layer, sides in sorted(found.items())}


def _decode_scale(name: str, scale: torch.Tensor, is_encode: bool) -> float:
    if scale.numel() != 1:
        raise CheckpointError(f"{name}: expected one element, found {list(scale.shape)}")
    value = float(scale)
    if not 0 < value < math.inf:
        raise CheckpointError(f"{name}: expected a finite number above 0, found {value}")
    return 1 / value if is_encode else value


def _files_with_scales(folder: Path) -> list[Path]:
    """The files to open: all, or with an index only those that it lists for KV scales."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        weight_map = read_weight_map(folder)
    except CheckpointError:
        if not single.is_file():
            raise
        weight_map = {}
    if single.is_file() and SINGLE_FILE not in weight_map.values():
        return [single]  # transformers reads this file and ignores the index
    files = {
        folder / file
        for name, file in weight_map.items()
        if is_kv_scale(name) or _BIAS_NAME.search(name)
    }
    return sorted(files)
