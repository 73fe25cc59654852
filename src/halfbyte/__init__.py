"""halfbyte: LLMs on a paged KV cache in NVFP4 (4-bit), on CPUs and NVIDIA GPUs.

The names below and the subpackages are imported lazily, so that `import halfbyte` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfbyte import transformers_hook

if TYPE_CHECKING:
    from halfbyte.engine import LLM, RequestOutput, SamplingParams
    from halfbyte.models import Cache, load_model

__version__ = "0.1.0"

__all__ = ["LLM", "Cache", "RequestOutput", "SamplingParams", "__version__", "load_model"]

_HOMES = {
    "LLM": "halfbyte.engine",
    "RequestOutput": "halfbyte.engine",
    "SamplingParams": "halfbyte.engine",
    "Cache": "halfbyte.models",
    "load_model": "halfbyte.models",
}
_PARTS = (
    *("attention", "checkpoints", "kvcache", "layouts", "linear"),
    *("models", "moe", "numerics", "quantization"),
)


# Lets `from_pretrained` load NVFP4 checkpoints; imports nothing by itself.
transformers_hook.install()


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"halfbyte.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
