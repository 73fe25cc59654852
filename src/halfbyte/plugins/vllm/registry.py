"""vLLM's registry of attention backends."""

from importlib import import_module
from typing import Any

BACKEND_PATH = "halfbyte.plugins.vllm.backend.HalfbyteAttentionBackend"

_HOOKS = (
    ("vllm.v1.attention.backend", "AttentionBackend"),
    ("vllm.v1.attention.backend", "AttentionImpl"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM"),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.config", "get_layers_from_vllm_config"),
)
"""What the plug-in is built on."""


def missing_hooks() -> list[str]:
    """Names in vLLM that the plug-in needs and this version does not have."""
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
    """Make `--attention-backend CUSTOM` mean halfbyte's backend.

    Raises:
        RuntimeError: it means another plug-in's already.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    try:
        taken = custom.get_path()
    except ValueError:  # nobody has registered one
        taken = BACKEND_PATH
    if taken != BACKEND_PATH:
        raise RuntimeError(f"attention backend CUSTOM is {taken}, of another plug-in")
    register_backend(custom, BACKEND_PATH)


def is_halfbyte(backend: Any) -> bool:
    """Whether an attention backend that a user chose is halfbyte's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if isinstance(backend, str):
        backend = AttentionBackendEnum.__members__.get(backend.upper())
    return backend is custom and bool(custom.get_path() == BACKEND_PATH)


def uses_halfbyte(vllm_config: Any) -> bool:
    """Whether some layers of a run have halfbyte's attention, a kind of layers or a draft's, too.

    Args:
        vllm_config: vLLM's.
    """
    attention = vllm_config.attention_config
    chosen = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    draft = getattr(vllm_config, "speculative_config", None)
    chosen.append(getattr(draft, "attention_backend", None))
    return any(is_halfbyte(backend) for backend in chosen if backend is not None)


def has_page_specs() -> bool:
    """Whether this vLLM lets a backend say what a page is (`customize_spec`, from 0.32 or so)."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")
