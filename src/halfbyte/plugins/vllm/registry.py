"""Registration in vLLM's registry of attention backends; whether a run uses halfbyte's parts."""

from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from halfbyte.plugins.vllm.options import Options

BACKEND_PATH = "halfbyte.plugins.vllm.backend.HalfbyteAttentionBackend"

_HOOKS = (
    ("vllm.v1.attention.backend", "AttentionBackend"),
    ("vllm.v1.attention.backend", "AttentionImpl"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM"),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.config", "get_layers_from_vllm_config"),
)
"""vLLM names that the plug-in requires."""


class _Plugin:
    """State of the plug-in in this process."""

    is_disabled = False


def disable() -> None:
    """Let vLLM run as if halfbyte were not installed: whatever is installed already stays idle."""
    _Plugin.is_disabled = True
    with suppress(Exception):  # of a registry that is not there, or not as expected
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if AttentionBackendEnum.CUSTOM.get_path() == BACKEND_PATH:
            AttentionBackendEnum.CUSTOM.clear_override()


def is_disabled() -> bool:
    """Whether vLLM runs without halfbyte, because it lacks something that the plug-in needs."""
    return _Plugin.is_disabled


def missing_hooks() -> list[str]:
    """Required names that this vLLM does not have."""
    missing = []
    for module, path in _HOOKS:
        try:
            found = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
    return missing


def register_attention() -> None:
    """Register halfbyte's backend as `--attention-backend CUSTOM`.

    Raises:
        RuntimeError: another plug-in has registered it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    try:
        taken = custom.get_path()
    except ValueError:  # none registered
        taken = BACKEND_PATH
    if taken != BACKEND_PATH:
        raise RuntimeError(f"attention backend CUSTOM is {taken}, of another plug-in")
    register_backend(custom, BACKEND_PATH)


def is_halfbyte(backend: Any) -> bool:
    """Whether the user's attention backend is halfbyte's."""
    if _Plugin.is_disabled:
        return False
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return is_custom(backend) and bool(AttentionBackendEnum.CUSTOM.get_path() == BACKEND_PATH)


def is_custom(backend: Any) -> bool:
    """Whether the user's attention backend is vLLM's `CUSTOM`, whoever registered it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if isinstance(backend, str):
        backend = AttentionBackendEnum.__members__.get(backend.upper())
    return backend is AttentionBackendEnum.CUSTOM


def uses_halfbyte(vllm_config: Any) -> bool:
    """Whether any layers of a run use halfbyte's attention: all, one layer type, or a draft's.

    Args:
        vllm_config: vLLM's.
    """
    draft = getattr(getattr(vllm_config, "speculative_config", None), "attention_backend", None)
    has_draft = draft is not None and is_halfbyte(draft)
    return has_draft or has_own_layers(vllm_config.attention_config)


def has_own_layers(attention: Any) -> bool:
    """Whether any layers of a model use halfbyte's attention.

    Args:
        attention: vLLM's `AttentionConfig`, of a target or a draft.
    """
    chosen = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    return any(is_halfbyte(backend) for backend in chosen if backend is not None)


def wants_kernels(vllm_config: Any, option: Literal["linear", "moe"]) -> bool:
    """Whether a run uses halfbyte's kernels for 4-bit weights; see `Options`.

    Args:
        vllm_config: vLLM's.
        option: of linear layers, or of experts.
    """
    if _Plugin.is_disabled:
        return False
    from vllm.platforms import current_platform

    choice = getattr(Options.parse(vllm_config.additional_config), option)
    if choice != "auto":
        return bool(choice == "on")
    if not uses_halfbyte(vllm_config):
        return False
    if current_platform.is_cpu():
        return True
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None:
        return False
    # SM100 and SM120: vLLM has kernels for native FP4 arithmetic. Experts were timed on SM90 only.
    return (90 if option == "moe" else 80) <= capability.to_int() <= 90


def has_page_specs() -> bool:
    """Whether backends define their pages in this vLLM (`customize_spec`, from 0.32 or so on)."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")
