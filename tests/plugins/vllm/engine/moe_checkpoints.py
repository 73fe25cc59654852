"""Small random checkpoints with NVFP4 experts."""

from pathlib import Path
from typing import Any

from checkpoints.folders import make_folder
from halfbyte.checkpoints import Dialect
from halfbyte.checkpoints.dialects.base import Scheme

_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128}


def make_nvfp4(folder: Path, architecture: str, dialect: Dialect, scheme: Scheme) -> Path:
    """NVFP4 in all layers but the routers; gate and up of an expert have their own global scales.

    The experts' 96 features are 48 for each of two ranks.
    """
    sizes = _SIZES | ({"moe_intermediate_size": 96} if architecture.startswith("qwen") else {})
    result = make_folder(folder, architecture, dialect, scheme, **sizes)
    result.declare(ignore=["lm_head", "*gate" if dialect == "modelopt" else "re:.*gate$"])
    return result.quantized
