"""K and V scales inside a checkpoint's safetensors files.

ModelOpt writes `…self_attn.k_proj.k_scale` and `…v_proj.v_scale`, compressed-tensors and vLLM
`…self_attn.k_scale` and `…self_attn.v_scale` (older files `…attn.k_scale`). All are decode
multipliers, one element each. Only the tensors' names are read until a name matches.
"""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

_SCALE_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:[\w.]+\.)?(?P<side>[kv])_scale$",
)
_INDEX_FILE = "model.safetensors.index.json"


def read_kv_scales(folder: str | Path) -> dict[int, tuple[float, float]]:
    """`{layer: (k_scale, v_scale)}` of a checkpoint's folder; empty if it stores none.

    Raises:
        ValueError: a file is broken, a scale has more than one element, or a layer has only one of
            the two scales.
    """
    found: dict[int, dict[str, float]] = {}
    for file in _files_with_scales(Path(folder)):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    match = _SCALE_NAME.search(name)
                    if match is None:
                        continue
                    scale = tensors.get_tensor(name)
                    if scale.numel() != 1:
                        raise ValueError(f"{name}: expected one element, got {tuple(scale.shape)}")
                    found.setdefault(int(match["layer"]), {})[match["side"]] = float(scale)
        except SafetensorError as error:
            raise ValueError(f"{file}: not a readable safetensors file: {error}") from None
    for layer, sides in found.items():
        if len(sides) != 2:
            raise ValueError(f"{folder}: layer {layer} has a {'/'.join(sides)}_scale only")
    return {layer: (sides["k"], sides["v"]) for layer, sides in sorted(found.items())}


def _files_with_scales(folder: Path) -> list[Path]:
    """The files to open: all, or where there is an index only those that it names for scales."""
    index = folder / _INDEX_FILE
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = json.loads(index.read_text()).get("weight_map", {})
    return sorted({folder / file for name, file in weight_map.items() if _SCALE_NAME.search(name)})
