"""Selects halfbyte's kernels for vLLM's MoE layers with NVFP4 or MXFP4 experts.

vLLM has a method class per format and dialect. Its constructor chooses one of vLLM's kernels, and
raises an error if there is none, as on CPUs. So `__new__` of such a class is wrapped: it returns an
object of halfbyte's subclass (`moe_method`) if that is enabled and supports the layer. Classes that
vLLM derives from them are not affected.
"""

import logging
from collections.abc import Mapping
from functools import cache, wraps
from inspect import signature
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import
from halfbyte.plugins.vllm.registry import wants_kernels

logger = logging.getLogger("halfbyte")

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED_TENSORS = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe"
_CLASSES = {
    f"{_QUANTIZATION}.modelopt": "ModelOptNvFp4FusedMoE",
    f"{_QUANTIZATION}.mxfp4": "GptOssMxfp4MoEMethod",
    f"{_COMPRESSED_TENSORS}.compressed_tensors_moe_w4a4_nvfp4": (
        "CompressedTensorsW4A4Nvfp4MoEMethod"
    ),
    f"{_COMPRESSED_TENSORS}.compressed_tensors_moe_w4a4_mxfp4": (
        "CompressedTensorsW4A4Mxfp4MoEMethod"
    ),
}
"""vLLM's method classes by module."""
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"


def install() -> None:
    """Wrap vLLM's classes when their modules are imported."""
    for module in _CLASSES:
        after_import(module, _wrap_module)
    after_import(_RUNNER, _wrap_runner)


def _wrap_module(module: ModuleType) -> None:
    """Let halfbyte make the methods of a vLLM module's class."""
    method: type = vars(module)[_CLASSES[module.__name__]]

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        chosen = _halfbyte_class(method, args, kwargs) if cls is method else None
        return object.__new__(chosen or cls)

    method.__new__ = make  # type: ignore[method-assign, assignment]


def _wrap_runner(module: ModuleType) -> None:
    """Let runners of halfbyte's experts have the fused router."""
    runner: type = vars(module)["MoERunner"]
    initialize = runner.__init__  # type: ignore[misc]
    if hasattr(initialize, "__wrapped__"):
        return

    @wraps(initialize)
    def initialize_and_fuse(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        from halfbyte.plugins.vllm.moe_router import fuse_router

        fuse_router(self)

    runner.__init__ = initialize_and_fuse  # type: ignore[misc]


def _halfbyte_class(method: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type | None:
    """halfbyte's subclass of a method for a layer; None if not enabled, or if it cannot run it.

    Args:
        method: vLLM's class.
        args, kwargs: of its constructor.

    Raises:
        ValueError: `Options.moe` is `on`, and the layer is not supported; the message says why.
    """
    from vllm.config import get_current_vllm_config_or_none

    from halfbyte.plugins.vllm.options import SECTION, Options

    config = get_current_vllm_config_or_none()
    if config is None or not wants_kernels(config, "moe"):
        return None
    from halfbyte.plugins.vllm.moe_limits import reason_against
    from halfbyte.plugins.vllm.moe_method import halfbyte_method
    from halfbyte.plugins.vllm.moe_weights import moe_config_of

    arguments = signature(method.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
    moe = moe_config_of(arguments)
    if moe.moe_backend != "auto":
        _warn_overruled(moe.moe_backend)
        return None
    reason = reason_against(method, arguments)
    if reason is None:
        return halfbyte_method(method)
    if Options.parse(config.additional_config).moe == "on":
        raise ValueError(f"{SECTION}: moe on: {reason} is not supported; use moe auto or off")
    _warn_left(reason)
    return None


@cache
def _warn_overruled(backend: str) -> None:
    """Log once that `--moe-backend` overrides halfbyte's kernels."""
    logger.warning("4-bit experts run on %s, as --moe-backend says", backend)


@cache
def _warn_left(reason: str) -> None:
    """Log once per reason that vLLM's kernels run the experts."""
    logger.warning("4-bit experts are left to vLLM: halfbyte does not support %s", reason)
