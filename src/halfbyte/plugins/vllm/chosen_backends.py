"""Models whose layers choose an attention backend themselves, although halfbyte's was asked for."""

import inspect
from functools import wraps
from types import ModuleType
from typing import Any

from halfbyte.after_import import after_import
from halfbyte.plugins.vllm.registry import has_page_specs, is_halfbyte

_LAYERS = "vllm.model_executor.layers.attention.attention"
_DIFFERENT_SIZES = "_DIFFKV"
"""End of the names of vLLM's backends for K and V of different head sizes."""


def install() -> None:
    """Wrap vLLM's attention layer when it is imported."""
    after_import(_LAYERS, _wrap)


def _wrap(module: ModuleType) -> None:
    layer: Any = vars(module)["Attention"]
    create = layer.__init__
    parameters = inspect.signature(create)

    @wraps(create)
    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        call = parameters.bind(self, *arguments, **options)
        given = call.arguments.get("attn_backend")
        if given is not None and _asked_for_halfbyte():
            call.arguments["attn_backend"] = _in_place_of(given, call.arguments.get("prefix", ""))
        create(*call.args, **call.kwargs)

    layer.__init__ = begin


def _asked_for_halfbyte() -> bool:
    """Whether all layers of the model at hand were to use halfbyte's attention."""
    from vllm.config import get_current_vllm_config

    backend = get_current_vllm_config().attention_config.backend
    return backend is not None and is_halfbyte(backend)


def _in_place_of(given: Any, layer: str) -> Any:
    """The backend of a layer whose model gave one; None for the one that was asked for.

    Args:
        given: a class of backends.
        layer: its name.

    Raises:
        ValueError: halfbyte cannot take its place.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from halfbyte.plugins.vllm.backend import HalfbyteAttentionBackend

    if issubclass(given, HalfbyteAttentionBackend):
        return given
    name = given.get_name()
    # Not a subclass, as of layers with sinks that are keys: it does more.
    is_known = name.endswith(_DIFFERENT_SIZES) and AttentionBackendEnum[name].get_class() is given
    if is_known and has_page_specs():
        return None
    raise ValueError(
        f"halfbyte: {name}, which the model chooses for {layer}, cannot be replaced; "
        "leave out --attention-backend"
    )
