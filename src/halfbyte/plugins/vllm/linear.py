"""Selects halfbyte's kernels for vLLM's NVFP4 linear layers.

vLLM chooses the kernel of every NVFP4 layer in `init_nvfp4_linear_kernel`, which forces its own
kernel for W4A16 before it looks at registered ones. So the function is wrapped in the modules of
the two dialects that halfbyte supports: it returns halfbyte's kernel if enabled, else vLLM's. Other
callers (Quark) are not affected.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import
from halfbyte.plugins.vllm.part_scales import keep_part_scales
from halfbyte.plugins.vllm.registry import wants_kernels

logger = logging.getLogger("halfbyte")

_KERNELS = "vllm.model_executor.kernels.linear"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_MODELOPT = f"{_QUANTIZATION}.modelopt"
_COMPRESSED_TENSORS = f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
_CHOOSE = "init_nvfp4_linear_kernel"
_METHODS = (
    "ModelOptLinearMethod",
    "ModelOptNvFp4LinearMethod",
    "ModelOptNvFp4W4A16LinearMethod",
    "CompressedTensorsW4A4Fp4",
)
"""Classes, in any vLLM version, that merge the global scales of fused parts."""


def install() -> None:
    """Wrap vLLM's functions when their modules are imported."""
    after_import(_MODELOPT, _wrap_module)
    after_import(_COMPRESSED_TENSORS, _wrap_module)


def _wrap_module(module: ModuleType) -> None:
    """Make the layers of a vLLM module try halfbyte's kernels first."""
    choose: Callable[..., Any] = vars(module)[_CHOOSE]

    @wraps(choose)
    def init_nvfp4_linear_kernel(use_a16: bool = False) -> Any:
        return _halfbyte_kernel(use_a16) or choose(use_a16)

    vars(module)[_CHOOSE] = init_nvfp4_linear_kernel
    for name in _METHODS:
        method = vars(module).get(name)
        if isinstance(method, type):
            keep_part_scales(method)
            _mark_before_loading(method)
    if hasattr(module, "ModelOptNvFp4W4A16LinearMethod"):  # 0.24 creates the Marlin kernel directly
        marlin = vars(module)["MarlinNvFp4LinearKernel"]
        vars(module)["MarlinNvFp4LinearKernel"] = lambda config: (
            _halfbyte_kernel(use_a16=True) or marlin(config)
        )


def _mark_before_loading(method: Any) -> None:
    """Make a vLLM method class mark the parameters of halfbyte's kernels (`unloaded`)."""
    create = method.create_weights

    @wraps(create)
    def create_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        mark = getattr(getattr(self, "kernel", None), "mark_unloaded", None)
        if mark is not None:
            mark(kwargs["layer"] if "layer" in kwargs else args[0])

    method.create_weights = create_weights


def _halfbyte_kernel(use_a16: bool) -> Any:
    """halfbyte's kernel for a layer, or None if not enabled."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not wants_kernels(config, "linear"):
        return None
    requested = _linear_backend(use_a16)
    if requested != "auto":
        _warn_overruled(requested)
        return None
    from halfbyte.plugins.vllm.linear_kernel import make_kernel

    return make_kernel(use_a16)


@cache
def _warn_overruled(backend: str) -> None:
    """Log once that `--linear-backend` overrides halfbyte's kernels."""
    logger.warning("NVFP4 linear layers run on %s, as --linear-backend says", backend)


def _linear_backend(use_a16: bool) -> str:
    """The value of `--linear-backend`, which overrides the automatic choice."""
    ask = getattr(import_module(_KERNELS), "_get_linear_backend", None)
    if ask is None:
        return "auto"
    try:
        return str(ask(quantization="nvfp4_w4a16" if use_a16 else "nvfp4_w4a4"))
    except TypeError:  # 0.24
        return str(ask())
